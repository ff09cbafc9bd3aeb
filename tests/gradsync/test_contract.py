"""Tensor-parallel, pipeline and data-parallel phases on whole worlds: every rank gets what one process would have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.placement import Placement, Replication
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync import GradientBucketingConfig
from asyncpar.nn import Array
from tests.gradsync.worlds import (
    Rank,
    assert_copies_equal,
    assert_right,
    draw_and_synchronize,
    on_all,
    on_all_failing,
    parallel_world,
    synchronize_all,
)
from tests.products import in_turn
from tests.soak import chosen, first

WORLDS = first(7, [(2, 1, 1), (1, 3, 1), (1, 2, 2), (2, 2, 2), (2, 1, 3), (1, 1, 4), (3, 1, 2), (2, 2, 3)])
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Call:
    """A collective over ``ranks`` (of the world)."""

    operation: str
    ranks: tuple[int, ...]
    count: int


class Recorder:
    """A communicator that writes down its collectives of arrays, and those of its subgroups."""

    def __init__(self, communicator: Any, calls: list[Call]) -> None:
        self._communicator = communicator
        self._calls = calls

    def subgroup(self, ranks: Sequence[int], **options: Any) -> Recorder | None:
        group = self._communicator.subgroup(ranks, **options)
        return None if group is None else Recorder(group, self._calls)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._communicator, name)
        if name not in COLLECTIVES:
            return attribute

        def record(x: Array, *arguments: Any, **options: Any) -> Any:
            self._calls.append(Call(name, self._communicator.ranks, x.size))
            return attribute(x, *arguments, **options)

        return record


@dataclass
class Records:
    """What each rank's communicators were asked for, by rank."""

    calls: dict[int, list[Call]] = field(default_factory=dict)

    def wrap(self, communicator: Any) -> Recorder:
        return Recorder(communicator, self.calls.setdefault(communicator.rank, []))

    def reduced(self, rank: int, ranks: Sequence[int]) -> list[int]:
        """Return how many values each all-reduce of a rank over a group had."""
        calls = self.calls[rank]
        return [call.count for call in calls if call.operation == "all_reduce" and call.ranks == tuple(ranks)]


@dataclass(frozen=True)
class Tensor:
    """A parameter of any placement."""

    name: str
    grad: Array
    placement: Placement


@dataclass(frozen=True)
class Tensors:
    held: Sequence[Tensor]

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.held)


@pytest.mark.parametrize(("dp", "tp", "pp"), WORLDS)
async def test_every_rank_gets_what_one_process_has(dp: int, tp: int, pp: int) -> None:
    async with parallel_world(dp, tp, pp) as ranks:
        for step in range(2):
            await draw_and_synchronize(ranks, step)
            for rank in ranks:
                assert_right(rank, step=step)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "order"),
    [(*sizes, order) for sizes, order in in_turn([(3, 1, 2), (2, 2, 2)], ["dp-tp-pp", "tp-dp-pp"])],
)
async def test_ranks_may_be_laid_out_in_any_order(dp: int, tp: int, pp: int, order: str) -> None:
    async with parallel_world(dp, tp, pp, parallelism={"order": order}) as ranks:
        for step in range(2):
            await draw_and_synchronize(ranks, step)
            for rank in ranks:
                assert_right(rank, step=step)


@pytest.mark.parametrize("bucket_size_mb", [0.00001, 25.0])
async def test_the_size_of_buckets_changes_nothing(bucket_size_mb: float) -> None:
    bucketing = GradientBucketingConfig(bucket_size_mb=bucket_size_mb, max_buckets=100)
    async with parallel_world(2, 2, 2, bucketing=bucketing) as ranks:
        await synchronize_all(ranks)
        for rank in ranks:
            assert_right(rank)


@pytest.mark.parametrize("overlap", [True, False])
async def test_ranks_of_one_stage_only_need_agree_upon_their_buckets(overlap: bool) -> None:
    """Stages have other parameters, and so other buckets; nothing makes them wait for each other."""
    bucketing = GradientBucketingConfig(bucket_size_mb=0.0001, max_buckets=100, overlap_communication=overlap)
    async with parallel_world(1, 2, 3, bucketing=bucketing) as ranks:
        await synchronize_all(ranks)
        for rank in ranks:
            assert_right(rank)


async def test_copies_are_equal_to_the_last_bit() -> None:
    async with parallel_world(2, 2, 3) as ranks:
        for step in range(chosen(2, soak=3)):
            await draw_and_synchronize(ranks, step)
            assert_copies_equal(ranks)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (1, 2, 1), (chosen(2, soak=4), 1, 2)])
async def test_each_mean_and_each_sum_is_taken_exactly_once(dp: int, tp: int, pp: int) -> None:
    async with parallel_world(dp, tp, pp) as ranks:
        for rank in ranks:
            rank.model.fill(lambda parameter: 3.0)
        for steps in range(1, 4):
            await synchronize_all(ranks)
            for rank in ranks:
                for parameter in rank.model.parameters():
                    grown = 2 if parameter.placement.tied is not None else 1
                    grown *= tp if parameter.placement.replicated is Replication.PARTIAL else 1
                    assert (parameter.grad == 3.0 * grown**steps).all(), parameter.name


async def test_the_down_projection_is_in_every_sync() -> None:
    async with parallel_world(2, 2, 2) as ranks:
        for step in range(chosen(2, soak=3)):
            await draw_and_synchronize(ranks, step)
            for rank in ranks:
                name = f"layer_{4 * rank.mapping.pp_rank + 1}_down_projection"
                np.testing.assert_allclose(rank.model.gradients()[name], rank.expected(step)[name], rtol=1e-5)


@pytest.mark.parametrize(("dp", "tp", "pp"), first(2, [(1, 2, 3), (3, 2, 1), (2, 2, 2)]))
async def test_over_tensor_parallel_ranks_goes_what_is_replicated_and_nothing_else(dp: int, tp: int, pp: int) -> None:
    records = Records()
    async with parallel_world(dp, tp, pp, wrap=records.wrap) as ranks:
        await synchronize_all(ranks)
        for rank in ranks:
            replicated = [p.grad.size for p in rank.model.parameters() if p.placement.replicated is not None]
            assert sum(records.reduced(rank.node.rank, tp_group(rank))) == sum(replicated)


def tp_group(rank: Rank) -> tuple[int, ...]:
    return tuple(rank.mapping.tp_group_ranks())


def dp_group(rank: Rank) -> tuple[int, ...]:
    return tuple(rank.mapping.dp_group_ranks())


@pytest.mark.parametrize(("dp", "tp", "pp"), first(3, [(2, 2, 2), (2, 1, 3), (1, 1, 4), (1, 2, 4)]))
async def test_a_tied_tensor_is_added_over_both_ends_once_and_without_the_middle(dp: int, tp: int, pp: int) -> None:
    records = Records()
    async with parallel_world(dp, tp, pp, wrap=records.wrap) as ranks:
        await synchronize_all(ranks)
        for rank in ranks:
            pipeline = rank.mapping.pp_group_ranks()
            ends = (pipeline[0], pipeline[-1])
            is_end = rank.mapping.is_pp_head() or rank.mapping.is_pp_tail()
            assert records.reduced(rank.node.rank, ends).count(54) == is_end
            assert [call for call in records.calls[rank.node.rank] if call.ranks == ends and not is_end] == []


@pytest.mark.parametrize("replicated", [Replication.WHOLE, Replication.PARTIAL])
async def test_phases_are_tensor_parallel_then_pipeline_then_data_parallel(replicated: Replication) -> None:
    records = Records()
    placement = Placement(replicated=replicated, tied="embedding")
    async with parallel_world(2, 2, 2, wrap=records.wrap) as ranks:

        async def main(rank: Rank) -> Array:
            held = Tensor("table", np.full(100, float(1 << rank.node.rank), np.float32), placement)
            await rank.synchronizer.synchronize_gradients(Tensors([held]))
            return held.grad

        results = await on_all(ranks, main)
        for rank, result in zip(ranks, results, strict=True):
            pipeline = tuple(rank.mapping.pp_group_ranks())
            calls = [call.ranks for call in records.calls[rank.node.rank] if call.count == 100]
            assert calls == [tp_group(rank), pipeline, dp_group(rank)]
            np.testing.assert_array_equal(result, 255.0 / 2 / (2 if replicated is Replication.WHOLE else 1))


@pytest.mark.parametrize("pp", [2, 3, 4])
async def test_a_tie_that_only_one_end_has_is_an_error_and_no_hang(pp: int) -> None:
    """The first stage ties its embedding, the last does not know of it."""
    async with parallel_world(1, 1, pp) as ranks:

        async def main(rank: Rank) -> None:
            tied = "embedding" if rank.mapping.is_pp_head() else None
            held = [Tensor("table", np.ones(50, np.float32), Placement(tied=tied)), *rank_tensors(rank)]
            await rank.synchronizer.synchronize_gradients(Tensors(held))

        for error in await on_all_failing(ranks, main):
            assert isinstance(error, UsageError if pp == 2 else (UsageError, PeerCancelled)), repr(error)


def rank_tensors(rank: Rank) -> list[Tensor]:
    return [Tensor(f"own_{rank.mapping.pp_rank}", np.ones(50, np.float32), Placement())]


@pytest.mark.parametrize("max_buckets", [4, 5])
async def test_max_buckets_holds_on_every_stage(max_buckets: int) -> None:
    """Four kinds of gradients share no bucket: slices, whole and partial copies, and a tied tensor."""
    bucketing = GradientBucketingConfig(bucket_size_mb=0.00001, max_buckets=max_buckets)
    async with parallel_world(2, 2, 3, bucketing=bucketing) as ranks:
        await synchronize_all(ranks)
        for rank in ranks:
            assert_right(rank)
            assert rank.synchronizer.get_sync_stats().total_buckets_synced <= max_buckets


async def test_fewer_buckets_than_kinds_are_refused_on_all_ranks() -> None:
    """The stage in the middle has one kind less, and would have got by."""
    bucketing = GradientBucketingConfig(max_buckets=3)
    async with parallel_world(1, 2, 3, bucketing=bucketing) as ranks:
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, UsageError)
            assert "max_buckets: expected at least 4" in str(error)


async def test_two_tensors_of_a_stage_cannot_share_a_tie() -> None:
    async with parallel_world(1, 1, 2) as ranks:

        async def main(rank: Rank) -> None:
            tie = Placement(tied="embedding")
            held = [Tensor(name, np.ones(3, np.float32), tie) for name in ("table", "head")]
            await rank.synchronizer.synchronize_gradients(Tensors(held))

        for error in await on_all_failing(ranks, main):
            assert isinstance(error, UsageError), repr(error)
            assert "embedding" in str(error)


async def test_a_tie_on_a_stage_in_between_is_an_error_on_all_ranks() -> None:
    """Only the ranks with the first and the last virtual stage add up what is tied: elsewhere copies would differ."""
    async with parallel_world(1, 1, 4) as ranks:

        async def main(rank: Rank) -> None:
            tied = "embedding" if rank.mapping.pp_rank in (1, 2) else None
            held = [Tensor("table", np.ones(50, np.float32), Placement(tied=tied)), *rank_tensors(rank)]
            await rank.synchronizer.synchronize_gradients(Tensors(held))

        errors = await on_all_failing(ranks, main)
    assert isinstance(errors[1], UsageError)
    assert "parameter table: expected a tie only on ranks with" in str(errors[1])
    for error in errors:
        assert isinstance(error, UsageError), repr(error)
