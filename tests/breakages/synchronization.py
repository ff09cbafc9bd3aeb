"""Mistakes in the synchronization of gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.arrays import Reduction
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import choice, layout_cache, step, synchronizer
from asyncpar.gradsync.groups import HostGroups, Name, SyncGroups, split_by_host
from asyncpar.gradsync.plan import Accumulation, HasGradient, Parameters, parameters_by_name
from asyncpar.gradsync.schemes import Exact, ReductionStep, Scheme
from tests.breakages.breakage import Breakage, Mistake, impatient, on_virtual_time
from tests.gradsync.worlds import Rank, assert_right, compressed, on_all, parallel_world, synchronize_all

MICRO_STEPS = 3


# -- checks -----------------------------------------------------------------------------------------------------------


def gradients_are_those_of_one_process(*sizes: int, tolerance: float = 1e-6, **settings: Any) -> Callable[[], None]:
    """Return the check that every rank of a world of (dp, tp, pp) gets what one process would have."""

    async def main() -> None:
        async with parallel_world(*sizes, wrap=impatient, **settings) as ranks:
            await synchronize_all(ranks)
            for rank in ranks:
                assert_right(rank, tolerance=tolerance)

    return on_virtual_time(main)


async def _equal_gradients_are_their_own_mean() -> None:
    async with parallel_world(2) as ranks:
        await on_all(ranks, _take_micro_steps)
        for rank in ranks:
            for name, gradient in rank.model.gradients().items():
                np.testing.assert_array_equal(gradient, np.ones_like(gradient), err_msg=name)


async def _take_micro_steps(rank: Rank) -> None:
    rank.model.fill(lambda _: 0.0)
    for micro_step in range(MICRO_STEPS):
        for parameter in rank.model.parameters():
            parameter.grad[...] += 1.0  # what a backward pass does
        if micro_step < MICRO_STEPS - 1:
            rank.synchronizer.accumulate(rank.model.shards)
    await rank.synchronize()


# -- mistakes ---------------------------------------------------------------------------------------------------------


def sum_all_slices(patch: pytest.MonkeyPatch) -> None:
    right = step.tensor_parallel_phase

    def wrong(scheme: Scheme, groups: SyncGroups, key: Name) -> ReductionStep | None:
        tp = groups.tp
        if tp is None or scheme.bucket.placement.replicated is not None:
            return right(scheme, groups, key)
        return ReductionStep(None, lambda: tp.all_reduce(scheme.payload, key=str(key)))

    patch.setattr(step, "tensor_parallel_phase", wrong)


def leave_out_down_projections(patch: pytest.MonkeyPatch) -> None:
    def wrong(parameters: Iterable[HasGradient]) -> dict[str, HasGradient]:
        found = parameters_by_name(parameters)
        return {name: found[name] for name in found if not name.endswith("down_projection")}

    patch.setattr(synchronizer, "parameters_by_name", wrong)


def reduce_tied_tensors_over_all_stages(patch: pytest.MonkeyPatch) -> None:
    """The ends wait for the stages in between, which have nothing tied and never come."""
    made = SyncGroups.of

    def wrong(config: ThreeDParallelismConfig, mapping: RankMapping, communicator: Communicator) -> SyncGroups:
        groups = made(config, mapping, communicator)
        pipeline = communicator.subgroup(mapping.pp_group_ranks(), key="broken")
        return groups if groups.embedding is None else dataclasses.replace(groups, embedding=pipeline)

    patch.setattr(SyncGroups, "of", staticmethod(wrong))


def drop_what_was_reduced(patch: pytest.MonkeyPatch) -> None:
    def wrong(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
        """Write nothing back."""

    patch.setattr(layout_cache, "unpack", wrong)


def forget_the_mean_over_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reduction, "finish", lambda self, result, size: None)


def forget_the_mean_over_micro_steps(patch: pytest.MonkeyPatch) -> None:
    right = layout_cache.pack

    def wrong(scheme: Scheme, packing: layout_cache.Packing) -> None:
        right(scheme, packing)
        scheme.payload[...] *= packing.micro_steps

    patch.setattr(layout_cache, "pack", wrong)


def take_the_mean_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exact, "is_mean", False)


def feed_sums_so_far(patch: pytest.MonkeyPatch) -> None:
    right = Accumulation.add

    def wrong(self: Accumulation, parameters: Sequence[HasGradient]) -> None:
        gradients = [parameter.grad.copy() for parameter in parameters]
        right(self, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad[...] = gradient

    patch.setattr(Accumulation, "add", wrong)


def order_by_a_hash_of_the_process(patch: pytest.MonkeyPatch) -> None:
    processes = itertools.count()

    def wrong(parameters: Iterable[HasGradient]) -> dict[str, HasGradient]:
        found, process = parameters_by_name(parameters), next(processes)
        return {name: found[name] for name in sorted(found, reverse=process % 2 == 1)}

    patch.setattr(synchronizer, "parameters_by_name", wrong)


def leaders_reduce_over_the_world(patch: pytest.MonkeyPatch) -> None:
    def wrong(replicas: Communicator) -> HostGroups | None:
        groups = split_by_host(replicas)
        if groups is None or groups.between is None:
            return groups
        return dataclasses.replace(groups, between=replicas.subgroup(range(replicas.size), key="broken"))

    patch.setattr(choice, "split_by_host", wrong)


# -- cases ------------------------------------------------------------------------------------------------------------

HOSTS = ["one", "one", "other", "other"]
HIERARCHICAL: dict[str, Any] = {
    "parallelism": {"comm_strategy": "hierarchical_all_reduce"},
    "compression": compressed("bf16"),
    "hosts": HOSTS,
    "tolerance": 2e-2,
}

REPLICAS = gradients_are_those_of_one_process(2, 1, 1)
MICRO_STEPS_AVERAGE = on_virtual_time(_equal_gradients_are_their_own_mean)

CASES = (
    Breakage(
        mistake=Mistake.SUMMED_SLICES,
        where="gradsync",
        switch_on=sum_all_slices,
        check=gradients_are_those_of_one_process(1, 2, 1),
        shows="layer_1_weight",
    ),
    Breakage(
        mistake=Mistake.LEFT_OUT,
        where="gradsync",
        switch_on=leave_out_down_projections,
        check=REPLICAS,
        shows="layer_1_down_projection",
    ),
    Breakage(
        mistake=Mistake.TIED_DEADLOCK,
        where="gradsync",
        switch_on=reduce_tied_tensors_over_all_stages,
        check=gradients_are_those_of_one_process(1, 1, 3),
        shows=r"waited 5\.0 s for rank \d",
    ),
    Breakage(
        mistake=Mistake.DROPPED_RESULT,
        where="gradsync",
        switch_on=drop_what_was_reduced,
        check=REPLICAS,
        shows="rank 0 layer_0_weight",
    ),
    Breakage(
        mistake=Mistake.MEAN_FORGOTTEN,
        where="gradsync",
        switch_on=forget_the_mean_over_ranks,
        check=REPLICAS,
        shows="rank 0 layer_0_weight",
    ),
    Breakage(
        mistake=Mistake.MEAN_FORGOTTEN,
        where="micro-steps",
        switch_on=forget_the_mean_over_micro_steps,
        check=MICRO_STEPS_AVERAGE,
        shows="layer_0_weight",
    ),
    Breakage(
        mistake=Mistake.MEAN_TWICE,
        where="gradsync",
        switch_on=take_the_mean_twice,
        check=REPLICAS,
        shows="rank 0 layer_0_weight",
    ),
    Breakage(
        mistake=Mistake.CUMULATIVE_BUFFER,
        where="gradsync",
        switch_on=feed_sums_so_far,
        check=MICRO_STEPS_AVERAGE,
        shows=rf"x and y|{MICRO_STEPS * (MICRO_STEPS + 1) // 2 / MICRO_STEPS}",
    ),
    Breakage(
        mistake=Mistake.HASH_ORDER,
        where="gradsync",
        switch_on=order_by_a_hash_of_the_process,
        check=REPLICAS,
        shows="expected the same names, shapes, dtypes, order and settings on all ranks",
    ),
    Breakage(
        mistake=Mistake.LEADERS_CALL_WORLD,
        where="gradsync",
        switch_on=leaders_reduce_over_the_world,
        check=gradients_are_those_of_one_process(4, 1, 1, **HIERARCHICAL),
        shows=r"waited 5\.0 s for rank \d",
    ),
)
