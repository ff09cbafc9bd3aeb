"""Accumulation over micro-steps: each weighs the same, also after a failure of any rank."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.gradsync import NonFinitePolicy
from tests.gradsync.worlds import (
    Rank,
    assert_copies_equal,
    compressed,
    on_all,
    on_all_failing,
    parallel_world,
    synchronize_all,
)
from tests.products import in_turn


def accumulate(ranks: list[Rank], steps: range) -> None:
    """Take micro-steps with the gradients drawn for ``steps``; those of the last are left for the step itself."""
    for rank in ranks:
        for step in steps:
            rank.draw(step)
            if step != steps[-1]:
                rank.synchronizer.accumulate(rank.model)
                assert not any(gradient.any() for gradient in rank.model.gradients().values())


def assert_mean_over(ranks: list[Rank], steps: range) -> None:
    for rank in ranks:
        every = [rank.expected(step) for step in steps]
        for name, gradient in rank.model.gradients().items():
            expected = np.mean([one[name] for one in every], axis=0)
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "count"),
    [(*sizes, count) for sizes, count in in_turn([(1, 1, 1), (2, 1, 1), (2, 2, 2)], [1, 5, 2])],
)
async def test_equal_gradients_over_micro_steps_weigh_as_one(dp: int, tp: int, pp: int, count: int) -> None:
    """Were sums fed to sums, k equal gradients would weigh k (k + 1) / 2."""
    async with parallel_world(dp, tp, pp) as ranks:
        for _ in range(3):
            for rank in ranks:
                for _ in range(count - 1):
                    rank.draw()
                    rank.synchronizer.accumulate(rank.model)
                rank.draw()
            await synchronize_all(ranks)
            assert_mean_over(ranks, range(1))


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (3, 1, 1), (2, 2, 2)])
async def test_a_step_is_the_mean_over_micro_steps_and_ranks(dp: int, tp: int, pp: int) -> None:
    async with parallel_world(dp, tp, pp) as ranks:
        for steps in (range(4), range(4, 6), range(6, 7)):
            accumulate(ranks, steps)
            await synchronize_all(ranks)
            assert_mean_over(ranks, steps)


async def test_a_micro_step_with_another_shape_takes_nothing() -> None:
    async with parallel_world(2) as ranks:
        rank = ranks[0]
        rank.synchronizer.accumulate(rank.model)
        rank.draw(1)
        before = rank.model.gradients()
        other = parallel_world(2, 1, 2)
        async with other as others:
            with pytest.raises(UsageError, match="expected those of earlier micro-steps"):
                rank.synchronizer.accumulate(others[0].model)
        for name, gradient in rank.model.gradients().items():
            np.testing.assert_array_equal(gradient, before[name])


async def test_ranks_with_other_numbers_of_micro_steps_disagree() -> None:
    async with parallel_world(2, 1, 2) as ranks:
        accumulate(ranks, range(3))
        ranks[2].synchronizer.accumulate(ranks[2].model)
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, UsageError)
            assert "rank 0 has step 1 of 3 micro-steps" in str(error)
            assert "rank 2 has step 1 of 4 micro-steps" in str(error)
        for rank in ranks:
            rank.synchronizer.clear_buffers()
        accumulate(ranks, range(2))
        await synchronize_all(ranks)
        assert_mean_over(ranks, range(2))


async def test_a_step_that_fails_keeps_what_was_accumulated() -> None:
    """So that it can be taken again, with gradients that are right."""
    async with parallel_world(2) as ranks:
        accumulate(ranks, range(3))
        next(iter(ranks[1].model.parameters())).grad.fill(np.nan)
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, NonFiniteValue)
        for rank in ranks:
            rank.draw(2)
        await synchronize_all(ranks)
        assert_mean_over(ranks, range(3))


async def test_a_skipped_step_forgets_what_was_accumulated() -> None:
    async with parallel_world(2, when_not_finite=NonFinitePolicy.SKIP_STEP) as ranks:
        accumulate(ranks, range(3))
        next(iter(ranks[1].model.parameters())).grad.fill(np.inf)
        for outcome in await on_all(ranks, lambda rank: rank.synchronizer.synchronize_gradients(rank.model)):
            assert outcome.is_skipped
        accumulate(ranks, range(4, 6))
        await synchronize_all(ranks)
        assert_mean_over(ranks, range(4, 6))


async def test_infinity_in_an_early_micro_step_is_found() -> None:
    async with parallel_world(2, 1, 2) as ranks:
        for rank in ranks:
            rank.draw(0)
        next(iter(ranks[3].model.parameters())).grad.fill(np.inf)
        for rank in ranks:
            rank.synchronizer.accumulate(rank.model)
            rank.draw(1)
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, NonFiniteValue)
            assert "rank 3 has NaN or infinity in layer_4_weight" in str(error)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2"])
async def test_accumulated_gradients_are_compressed_once(codec: str) -> None:
    """What is sent and what is kept are together the mean over micro-steps: one residual, not one for each of them."""
    async with parallel_world(2, compression=compressed(codec)) as ranks:
        accumulate(ranks, range(3))
        await synchronize_all(ranks)
        assert_copies_equal(ranks)
        residuals = [rank.synchronizer.residuals() for rank in ranks]
        for name, gradient in ranks[0].model.gradients().items():
            left = np.mean([each[name] for each in residuals], axis=0).reshape(gradient.shape)
            expected = np.mean([ranks[0].expected(step)[name] for step in range(3)], axis=0)
            np.testing.assert_allclose(gradient + left, expected, atol=1e-5, err_msg=name)
