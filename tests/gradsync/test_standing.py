"""Steps without a comparison: fewer collectives, and all that a comparison finds is found all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.errors import NonFiniteValue, PeerError, UsageError
from asyncpar.gradsync import GradientBucketingConfig, TuningConfig
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD, EarlyStep, Optimizer
from tests.gradsync.worlds import (
    SMALL_BUCKETS,
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all,
    on_all_failing,
    parallel_world,
    synchronize_all,
)
from tests.products import in_turn
from tests.soak import chosen

COUNTED = 5
SWITCHES = 8
"""Turns of the loop in which ranks get far into a step."""


async def warm_up(ranks: Sequence[Rank]) -> None:
    """Take steps until ranks take them without a comparison."""
    for step in range(3):
        await draw_and_synchronize(ranks, step)


def comparisons(ranks: Sequence[Rank]) -> list[int]:
    """Return the calls of all_gather on each rank: one in every step for its end, one for each comparison."""
    return [rank.node.world.traffic.of("all_gather").calls for rank in ranks]


async def count_comparisons(ranks: Sequence[Rank], step: Callable[[Rank], Awaitable[object]]) -> set[int]:
    """Take some steps and return how many comparisons ranks have made in them."""
    before = comparisons(ranks)
    for _ in range(COUNTED):
        await on_all(ranks, step)
    return {after - calls - COUNTED for calls, after in zip(before, comparisons(ranks), strict=True)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("overlap", [True, False])
async def test_steps_like_the_one_before_are_not_compared(size: int, overlap: bool) -> None:
    bucketing = GradientBucketingConfig(bucket_size_mb=0.0005, max_buckets=64, overlap_communication=overlap)
    async with parallel_world(size, bucketing=bucketing) as ranks:
        await warm_up(ranks)
        assert await count_comparisons(ranks, lambda rank: rank.synchronize()) == {0}
        await draw_and_synchronize(ranks, 7)
        for rank in ranks:
            assert_right(rank, step=7)


async def test_steps_are_compared_in_which_not_all_ranks_reduce_every_bucket() -> None:
    async with parallel_world(2, 2) as ranks:
        await warm_up(ranks)
        assert await count_comparisons(ranks, lambda rank: rank.synchronize()) == {COUNTED}


async def test_what_all_ranks_change_is_compared_once() -> None:
    async with parallel_world(2) as ranks:
        await warm_up(ranks)
        before = comparisons(ranks)
        for rank in ranks:
            rank.synchronizer.update_bucketing_config(GradientBucketingConfig(bucket_size_mb=1.0))
        for step in range(4):
            await draw_and_synchronize(ranks, step)
            for rank in ranks:
                assert_right(rank, step=step)
        assert [after - calls for calls, after in zip(before, comparisons(ranks), strict=True)] == [5, 5]


async def begin_without(ranks: Sequence[Rank], last: Rank) -> list[asyncio.Task[None]]:
    """Let all ranks but ``last`` begin a step, and wait in their buckets for it."""
    tasks = [asyncio.ensure_future(rank.synchronize()) for rank in ranks if rank is not last]
    for _ in range(SWITCHES):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(
    ("codec", "transport"), in_turn(["none", "bf16", "int8", "powersgd:2"], ["inproc", "tcp", "shm"])
)
async def test_ranks_in_their_buckets_begin_anew_when_another_rank_has_to_compare(codec: str, transport: str) -> None:
    """Restoring residuals changes nothing here, but the rank cannot know that."""
    async with parallel_world(3, transport=transport, compression=compressed(codec)) as ranks:
        await warm_up(ranks)
        for number, culprit in enumerate(ranks):
            for rank in ranks:
                rank.draw(number)
            before = comparisons(ranks)
            culprit.synchronizer.restore_residuals(culprit.synchronizer.residuals())
            tasks = await begin_without(ranks, culprit)
            await culprit.synchronize()
            await asyncio.gather(*tasks)
            if codec != "int8":  # whose buckets are gathered, too
                assert list(np.subtract(comparisons(ranks), before)) == [2, 2, 2]
            if codec == "none":
                for rank in ranks:
                    assert_right(rank, step=number)
            assert_copies_equal(ranks)


@pytest.mark.parametrize("codec", ["int8", "powersgd:2"])
async def test_beginning_anew_leaves_no_trace_in_results(codec: str) -> None:
    """The bits are those of steps in which no rank had to compare."""
    found = []
    for doubts in (False, True):
        async with parallel_world(3, compression=compressed(codec)) as ranks:
            await warm_up(ranks)
            for number in range(4):
                for rank in ranks:
                    rank.draw(number)
                if doubts:
                    ranks[1].synchronizer.restore_residuals(ranks[1].synchronizer.residuals())
                tasks = await begin_without(ranks, ranks[1])
                await ranks[1].synchronize()
                await asyncio.gather(*tasks)
            found.append([rank.model.gradients() for rank in ranks])
    for one, other in zip(*found, strict=True):
        for name, gradient in one.items():
            np.testing.assert_array_equal(gradient, other[name])


async def test_a_rank_that_compares_first_is_joined_by_those_that_come_later() -> None:
    async with parallel_world(3) as ranks:
        await warm_up(ranks)
        for rank in ranks:
            rank.draw(9)
        ranks[2].synchronizer.restore_residuals({})
        early = asyncio.ensure_future(ranks[2].synchronize())
        for _ in range(100):
            await asyncio.sleep(0)
        await on_all(ranks[:2], lambda rank: rank.synchronize())
        await early
        for rank in ranks:
            assert_right(rank, step=9)


@pytest.mark.parametrize(
    ("codec", "hosts"), in_turn(["none", "int8"], [["a", "b", "b", "a", "c"], ["a", "a", "b", "b"]])
)
async def test_it_is_so_where_hosts_reduce_first(codec: str, hosts: list[str]) -> None:
    parallelism = {"comm_strategy": CommunicationStrategy.HIERARCHICAL_ALL_REDUCE}
    async with parallel_world(
        len(hosts), hosts=hosts, parallelism=parallelism, compression=compressed(codec), transport=None
    ) as ranks:
        await warm_up(ranks)
        for culprit in ranks:
            for rank in ranks:
                rank.draw(4)
            culprit.synchronizer.restore_residuals(culprit.synchronizer.residuals())
            tasks = await begin_without(ranks, culprit)
            await culprit.synchronize()
            await asyncio.gather(*tasks)
            assert_copies_equal(ranks)
            if codec == "none":
                for rank in ranks:
                    assert_right(rank, step=4)


async def test_an_early_update_gets_every_element_once_although_ranks_begin_anew() -> None:
    async with parallel_world(2) as ranks:
        held = [[Parameter("w", np.zeros(5000, np.float32)), Parameter("b", np.zeros(7, np.float32))] for _ in ranks]
        optimizers = [Optimizer(parameters, SGD()) for parameters in held]

        async def step(rank: Rank) -> None:
            place = rank.node.rank
            for parameter in held[place]:
                parameter.grad[...] = place + 1.0
            update = EarlyStep(optimizers[place], 0.1)
            async with rank.synchronizer.step(held[place], update=update):
                pass

        for _ in range(3):
            await on_all(ranks, step)
        ranks[1].synchronizer.restore_residuals({})
        first = asyncio.ensure_future(step(ranks[0]))
        for _ in range(SWITCHES):
            await asyncio.sleep(0)
        await step(ranks[1])
        await first
        for parameters in held:
            for parameter in parameters:
                np.testing.assert_allclose(parameter.value, -0.1 * 1.5 * 4, rtol=1e-5)


DIFFERENCES: dict[str, Callable[[Rank], object]] = {
    "buckets": lambda rank: rank.synchronizer.update_bucketing_config(GradientBucketingConfig(bucket_size_mb=1.0)),
    "codec": lambda rank: rank.synchronizer.update_compression_config(compressed("int8")),
    "chosen codec": lambda rank: rank.synchronizer.update_compression_config(compressed("auto")),
    "micro-steps": lambda rank: rank.synchronizer.accumulate(rank.model),
    "tuning": lambda rank: rank.synchronizer.update_tuning_config(TuningConfig()),
    "number": lambda rank: rank.synchronizer.restore({}, steps=40),
}


@pytest.mark.parametrize(("difference", "is_late"), in_turn(DIFFERENCES, [False, True]))
async def test_a_change_on_one_rank_is_an_error_on_all(difference: str, is_late: bool) -> None:
    async with parallel_world(3) as ranks:
        await warm_up(ranks)
        culprit = ranks[1]
        for rank in ranks:
            rank.draw(5)
        DIFFERENCES[difference](culprit)
        before = [rank.model.gradients() for rank in ranks]
        tasks = await begin_without(ranks, culprit) if is_late else []
        rest = [culprit] if is_late else ranks
        errors = await on_all_failing(rest, lambda rank: rank.synchronize())
        errors += [error for error in await asyncio.gather(*tasks, return_exceptions=True) if error is not None]
        assert len(errors) == 3
        for error in errors:
            assert isinstance(error, SettingsDiffer), repr(error)
            assert "rank 0" in str(error)
            assert "rank 1" in str(error)
        for rank, kept in zip(ranks, before, strict=True):
            for name, gradient in rank.model.gradients().items():
                np.testing.assert_array_equal(gradient, kept[name])


async def test_a_refusal_on_one_rank_reaches_ranks_that_are_in_their_buckets() -> None:
    async with parallel_world(3) as ranks:
        await warm_up(ranks)
        for _ in range(2):
            tasks = await begin_without(ranks, ranks[1])
            parameters = [*ranks[1].model.parameters()] * 2
            with pytest.raises(UsageError, match="name"):
                async with ranks[1].synchronizer.step(parameters):
                    pass
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, SettingsDiffer) for error in errors), errors
            await warm_up(ranks)
        await draw_and_synchronize(ranks, 6)
        for rank in ranks:
            assert_right(rank, step=6)


@pytest.mark.parametrize(
    ("turns", "culprit"),
    in_turn([*range(1, 16, chosen(4, soak=1)), *range(16, 80, chosen(21, soak=7))], range(3)),
)
async def test_a_rank_may_be_cancelled_while_others_begin_anew(turns: int, culprit: int) -> None:
    async with parallel_world(3) as ranks:
        await warm_up(ranks)
        for rank in ranks:
            rank.draw(8)
        before = [rank.model.gradients() for rank in ranks]
        ranks[1].synchronizer.restore_residuals({})
        tasks = [asyncio.ensure_future(rank.synchronize()) for rank in (ranks[0], ranks[2], ranks[1])]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[culprit].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for place, result in zip((0, 2, 1), results, strict=True):
            if result is not None:
                assert isinstance(result, (asyncio.CancelledError, PeerError)), repr(result)
                for name, gradient in ranks[place].model.gradients().items():
                    np.testing.assert_array_equal(gradient, before[place][name])
        await draw_and_synchronize(ranks, 9)
        for rank in ranks:
            assert_right(rank, step=9)


class BrokenUpdate:
    """Fails when all ranks have completed the step."""

    def take(self, name: str, part: slice, mean: Array) -> None: ...
    def undo(self) -> None: ...
    def commit(self) -> None:
        raise OSError("the disk is full")


async def test_a_rank_that_fails_alone_at_the_very_end_of_a_step_goes_on_with_the_others() -> None:
    """The others take the next step without a comparison, and it cannot."""
    async with parallel_world(3) as ranks:
        await warm_up(ranks)
        for late in (False, True):

            async def fail(rank: Rank) -> None:
                async with rank.synchronizer.step(rank.model.parameters(), update=BrokenUpdate()):
                    pass

            tasks = [asyncio.ensure_future(rank.synchronize()) for rank in (ranks[0], ranks[2])]
            with pytest.raises(OSError, match="the disk is full"):
                await fail(ranks[1])
            await asyncio.gather(*tasks)
            for rank in ranks:
                rank.draw(6)
            tasks = await begin_without(ranks, ranks[1]) if late else []
            await on_all([ranks[1]] if late else ranks, lambda rank: rank.synchronize())
            await asyncio.gather(*tasks)
            for rank in ranks:
                assert_right(rank, step=6)
            assert await count_comparisons(ranks, lambda rank: rank.synchronize()) == {0}


async def test_values_that_are_not_finite_are_found_without_a_comparison() -> None:
    async with parallel_world(2, bucketing=SMALL_BUCKETS) as ranks:
        await warm_up(ranks)
        next(ranks[1].model.parameters()).grad[...] = np.nan
        errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
        assert all(isinstance(error, NonFiniteValue) for error in errors)
        await draw_and_synchronize(ranks, 3)
        for rank in ranks:
            assert_right(rank, step=3)


async def test_a_restart_begins_with_a_comparison_on_all_ranks() -> None:
    async with parallel_world(2) as ranks:
        await warm_up(ranks)
        for rank in ranks:
            rank.synchronizer.restart(1)
        before = comparisons(ranks)
        await synchronize_all(ranks)
        assert list(np.subtract(comparisons(ranks), before)) == [2, 2]
