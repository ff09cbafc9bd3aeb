"""NaN and infinity on one rank: what each policy makes of them, on every rank alike, with every codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.gradsync import NonFinitePolicy, StepOutcome
from asyncpar.nn import Array
from tests.gradsync.worlds import (
    CODECS,
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all,
    on_all_failing,
    parallel_world,
)
from tests.products import in_turn
from tests.soak import chosen

BAD = (np.nan, np.inf, -np.inf)


def spoil(rank: Rank, name: str, value: float = np.nan) -> None:
    """Put one bad value into a gradient."""
    gradient = next(parameter.grad for parameter in rank.model.parameters() if parameter.name == name)
    gradient.flat[gradient.size // 2] = value


def snapshot(rank: Rank) -> dict[str, Any]:
    """Return all that a failed step must leave as it is."""
    kept = {f"state of {name}": value for name, value in rank.synchronizer.state().items() if value.any()}
    return {**rank.model.gradients(), **kept}


def assert_unchanged(rank: Rank, before: dict[str, Array]) -> None:
    after = snapshot(rank)
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=f"rank {rank.node.rank} {name}")


def fill_all(rank: Rank, value: float) -> None:
    rank.model.fill(lambda parameter: value)


@pytest.mark.parametrize("codec", CODECS)
async def test_abort_names_rank_and_parameter_everywhere_and_changes_nothing(codec: str) -> None:
    async with parallel_world(3, compression=compressed(codec)) as ranks:
        await draw_and_synchronize(ranks, 0)
        for rank in ranks:
            rank.draw(1)
        spoil(ranks[1], "layer_1_down_projection")
        before = [snapshot(rank) for rank in ranks]
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, NonFiniteValue)
            assert "rank 1 has NaN or infinity in layer_1_down_projection" in str(error)
        for rank, kept in zip(ranks, before, strict=True):
            assert_unchanged(rank, kept)
            assert rank.synchronizer.get_sync_stats().total_sync_operations == 1
        await draw_and_synchronize(ranks, 2)
        assert_copies_equal(ranks)
        if codec == "none":
            for rank in ranks:
                assert_right(rank, step=2)


CULPRITS = [
    (5, "layer_5_down_projection"),  # (dp, tp, pp) = (1, 0, 1): a slice
    (6, "layer_2_bias"),  # (1, 1, 0): replicated
    (7, "layer_901_weight"),  # (1, 1, 1): tied
    (2, "layer_3_weight"),  # (0, 1, 0): a part of a sum
]


@pytest.mark.parametrize(("culprit_and_name", "value", "codec"), in_turn(CULPRITS, BAD, ["none", "int8"]))
async def test_with_all_kinds_of_parallelism_every_rank_learns_who_it_was(
    culprit_and_name: tuple[int, str], value: float, codec: str
) -> None:
    culprit, name = culprit_and_name
    async with parallel_world(2, 2, 2, compression=compressed(codec)) as ranks:
        spoil(ranks[culprit], name, value)
        before = [snapshot(rank) for rank in ranks]
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, NonFiniteValue)
            assert f"rank {culprit} has NaN or infinity in {name}" in str(error)
            assert "overflowed" not in str(error)
        for rank, kept in zip(ranks, before, strict=True):
            assert_unchanged(rank, kept)
        await draw_and_synchronize(ranks, 1)
        assert_copies_equal(ranks)


@pytest.mark.parametrize("codec", chosen(CODECS[1::2], soak=CODECS))
async def test_skip_step_leaves_everything_and_says_so_on_every_rank(codec: str) -> None:
    skip, slices = NonFinitePolicy.SKIP_STEP, 2 if codec == "int8" else chosen(1, soak=2)
    async with parallel_world(2, slices, 2, compression=compressed(codec), when_not_finite=skip) as ranks:
        await draw_and_synchronize(ranks)
        spoil(ranks[3], "layer_5_bias", np.inf)
        before = [snapshot(rank) for rank in ranks]
        for outcome in await on_all(ranks, take_step):
            assert outcome.is_skipped
            assert "layer_5_bias" in outcome.text
        for rank, kept in zip(ranks, before, strict=True):
            assert_unchanged(rank, kept)
            statistics = rank.synchronizer.get_sync_stats()
            assert (statistics.total_sync_operations, statistics.total_skipped_steps) == (1, 1)
        for rank in ranks:
            rank.draw(1)
        for outcome in await on_all(ranks, take_step):
            assert not outcome.is_skipped
            assert outcome.text == ""
        assert_copies_equal(ranks)


async def take_step(rank: Rank) -> StepOutcome:
    async with rank.synchronizer.step(rank.model.parameters()) as step:
        pass
    return step.outcome


@pytest.mark.parametrize("codec", chosen(CODECS[::2], soak=CODECS))
async def test_drop_takes_the_mean_of_the_others_and_names_who_was_left_out(codec: str) -> None:
    drop = NonFinitePolicy.DROP
    async with parallel_world(3, compression=compressed(codec), when_not_finite=drop) as ranks:
        for rank in ranks:
            fill_all(rank, 2.0**rank.node.rank)
        spoil(ranks[2], "layer_1_weight")
        for outcome in await on_all(ranks, take_step):
            assert not outcome.is_skipped
            assert outcome.culprits == {2: ["layer_1_weight"]}
        assert_copies_equal(ranks)
        if codec in ("none", "bf16", "fp16", "int8"):
            for rank in ranks:
                gradients = rank.model.gradients()
                np.testing.assert_allclose(gradients["layer_1_weight"], 1.5, rtol=0.02)
                np.testing.assert_allclose(gradients["layer_0_bias"], 7 / 3, rtol=0.02)
        await draw_and_synchronize(ranks, 1)
        assert_copies_equal(ranks)


@pytest.mark.parametrize(("culprit", "codec"), in_turn(range(5), ["bf16", "int8"]))
async def test_drop_takes_the_mean_of_the_others_where_hosts_reduce_first(codec: str, culprit: int) -> None:
    hosts = ["a", "a", "b", "c", "b"]
    async with parallel_world(
        5,
        hosts=hosts,
        parallelism={"comm_strategy": CommunicationStrategy.HIERARCHICAL_ALL_REDUCE},
        compression=compressed(codec),
        when_not_finite=NonFinitePolicy.DROP,
    ) as ranks:
        for rank in ranks:
            fill_all(rank, 2.0**rank.node.rank)
        spoil(ranks[culprit], "layer_1_weight")
        for outcome in await on_all(ranks, take_step):
            assert outcome.culprits == {culprit: ["layer_1_weight"]}
        for rank in ranks:
            gradients = rank.model.gradients()
            np.testing.assert_allclose(gradients["layer_1_weight"], (31 - 2.0**culprit) / 4, rtol=0.02)
            np.testing.assert_allclose(gradients["layer_0_bias"], 31 / 5, rtol=0.02)


async def test_drop_raises_when_nobody_is_left() -> None:
    async with parallel_world(2, when_not_finite=NonFinitePolicy.DROP) as ranks:
        for rank in ranks:
            spoil(rank, "layer_0_bias")
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, NonFiniteValue)
            assert "rank 0 has NaN or infinity in layer_0_bias; rank 1 has" in str(error)
        await draw_and_synchronize(ranks, 1)
        for rank in ranks:
            assert_right(rank, step=1)


async def test_drop_is_refused_where_it_could_not_be_the_same_on_all_ranks() -> None:
    with pytest.raises(UsageError, match="when_not_finite: drop is for data parallelism alone"):
        async with parallel_world(1, 2, when_not_finite=NonFinitePolicy.DROP):
            pass


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "topk:0.1", "powersgd:2"])
async def test_finite_gradients_with_an_infinite_sum_are_an_error_on_all(codec: str) -> None:
    async with parallel_world(4, compression=compressed(codec)) as ranks:
        await draw_and_synchronize(ranks)
        for rank in ranks:
            fill_all(rank, 3e38)
        before = [snapshot(rank) for rank in ranks]
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, NonFiniteValue)
            assert "overflow" in str(error)
        for rank, kept in zip(ranks, before, strict=True):
            assert_unchanged(rank, kept)
        await draw_and_synchronize(ranks, 1)
        assert_copies_equal(ranks)


async def test_one_process_alone_judges_as_many_do() -> None:
    async with parallel_world(1, when_not_finite=NonFinitePolicy.SKIP_STEP) as ranks:
        spoil(ranks[0], "layer_1_bias")
        outcome = await take_step(ranks[0])
        assert outcome.is_skipped
        assert outcome.culprits == {0: ["layer_1_bias"]}
    async with parallel_world(1) as ranks:
        spoil(ranks[0], "layer_1_bias")
        with pytest.raises(NonFiniteValue, match="rank 0 has NaN or infinity in layer_1_bias"):
            await ranks[0].synchronize()
