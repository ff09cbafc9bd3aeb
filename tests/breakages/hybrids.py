"""Mistakes in 3D-parallel training, in whatever part they are: a whole model must be that of one process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache

import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy, ThreeDParallelismConfig
from asyncpar.gradsync import synchronizer
from asyncpar.gradsync.plan import HasGradient, parameters_by_name
from asyncpar.hybrid import HybridConfig
from asyncpar.nn.optimizers import SGD, clip_factor
from asyncpar.nn.parameter import OnGradient
from asyncpar.nn.tensor import TensorRegion
from asyncpar.nn.tensor.group import BridgedGroup
from asyncpar.zero.flow import ReplicatedFlow
from tests.breakages.breakage import Breakage, Mistake, first_error
from tests.breakages.partitions import let_the_world_be_every_group
from tests.breakages.pipelines import recompute_from_zeros, save_outputs_of_recomputed_layers
from tests.breakages.synchronization import (
    drop_what_was_reduced,
    forget_the_mean_over_ranks,
    sum_all_slices,
    take_the_mean_twice,
)
from tests.hybrid.worlds import TINY, assert_same, train_alone, train_together

MODEL = replace(TINY, layers=4)
"""Two layers for each of two stages: recomputing matters where a stage has more than one."""

CLIP = 0.3
ROWS = 8

# -- checks ------------------------------------------------------------------------------------------------------------


@cache
def coordinators_train_as_one_process(dp: int, tp: int, pp: int) -> Callable[[], None]:
    """Return the check that one clipped step over (dp, tp, pp) gives the model that one process has."""

    def check() -> None:
        parallelism = ThreeDParallelismConfig(
            dp_size=dp,
            tp_size=tp,
            pp_size=pp,
            num_layers=MODEL.layers,
            memory_strategy=MemoryOptimizationStrategy.STANDARD,
        )
        config = HybridConfig(parallelism=parallelism, micro_batches=2, rule=SGD(momentum=0.5), clip_norm=CLIP)
        try:
            together = asyncio.run(train_together(MODEL, config, rows=ROWS, steps=1))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        assert_same(train_alone(MODEL, config, rows=ROWS, steps=1), together, tolerance=1e-12)

    return check


# -- mistakes ----------------------------------------------------------------------------------------------------------


def leave_out_mlps(patch: pytest.MonkeyPatch) -> None:
    def wrong(parameters: Iterable[HasGradient]) -> dict[str, HasGradient]:
        return {name: each for name, each in parameters_by_name(parameters).items() if "mlp" not in name}

    patch.setattr(synchronizer, "parameters_by_name", wrong)


def leave_layers_without_the_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TensorRegion, "leave", lambda self, y: y)


def hold_the_first_slice_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BridgedGroup, "rank", 0)


def clip_before_reducing(patch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def wrong(self: ReplicatedFlow) -> AsyncIterator[OnGradient]:
        yield lambda name: None
        norm = math.sqrt(self._optimizer.squared_norm())
        for parameter in self.parameters:
            parameter.grad[...] *= clip_factor(norm, CLIP)
        async with self._synchronizer.step(self.parameters):
            pass

    patch.setattr(ReplicatedFlow, "reducing", wrong)


# -- cases -------------------------------------------------------------------------------------------------------------


def _case(
    mistake: Mistake,
    switch_on: Callable[[pytest.MonkeyPatch], None],
    *sizes: int,
    shows: str = "Not equal to tolerance",
) -> Breakage:
    dp, tp, pp = sizes
    check = coordinators_train_as_one_process(dp, tp, pp)
    return Breakage(mistake=mistake, where="hybrid", switch_on=switch_on, check=check, shows=shows)


CASES = (
    _case(
        Mistake.SUMMED_SLICES, sum_all_slices, 1, 2, 1, shows=r"rank 0 calls all_reduce\(.*rank 1 calls all_reduce\("
    ),
    _case(Mistake.LEFT_OUT, leave_out_mlps, 2, 1, 1, shows="expected a parameter of this step, got .*mlp"),
    _case(Mistake.DROPPED_RESULT, leave_layers_without_the_sum, 1, 2, 1),
    _case(Mistake.MEAN_FORGOTTEN, forget_the_mean_over_ranks, 2, 1, 1),
    _case(Mistake.MEAN_TWICE, take_the_mean_twice, 2, 1, 1),
    _case(Mistake.UNSYNCHRONIZED_APPLIED, drop_what_was_reduced, 2, 1, 1, shows="replicas differ"),
    _case(Mistake.RANK_IS_ZERO, hold_the_first_slice_on_every_rank, 1, 2, 1),
    _case(Mistake.SUBGROUP_IS_WORLD, let_the_world_be_every_group, 2, 2, 1, shows="expected a group of 1 ranks"),
    _case(Mistake.CLIPPED_TOO_EARLY, clip_before_reducing, 2, 1, 1),
    _case(Mistake.OUTPUTS_SAVED, save_outputs_of_recomputed_layers, 1, 1, 2),
    _case(Mistake.ZEROS_RECOMPUTED, recompute_from_zeros, 1, 1, 2),
)
