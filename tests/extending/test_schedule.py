"""A pipeline schedule from outside the package: a subclass of ``Schedule`` that an executor takes as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.hybrid import HybridConfig
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import PipelineOp, Schedule, check_schedule, simulate
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.operation import OperationKind
from asyncpar.pipeline.result import PipelineResult
from tests.pipeline.real_stages import alone, cut_model, gradients_of, make_executors, make_samples, run_all
from tests.pipeline.worlds import Ranks, in_virtual_time

MICRO_BATCHES = 5


@dataclass(frozen=True, kw_only=True)
class TwoByTwo(Schedule):
    """Two micro-batches forward, then the same two backward, and so on."""

    num_stages: int
    num_microbatches: int
    num_model_chunks: int = 1

    @property
    def name(self) -> str:
        return "two by two"

    @property
    def layout(self) -> StageLayout:
        return StageLayout.looped(self.num_stages)

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        order = []
        for first in range(0, self.num_microbatches, 2):
            pair = range(first, min(first + 2, self.num_microbatches))
            for kind in (OperationKind.FORWARD, OperationKind.BACKWARD):
                order += [PipelineOp(kind=kind, stage=rank, micro_batch=number, chunk=0) for number in pair]
        return tuple(order)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_computes_what_one_process_computes(ranks: int) -> None:
    schedule = TwoByTwo(num_stages=ranks, num_microbatches=MICRO_BATCHES)
    inputs, targets = make_samples(MICRO_BATCHES)

    async def main(world: Ranks) -> tuple[list[PipelineResult], dict[str, Array]]:
        executors, held = make_executors(schedule, world)
        results = await run_all(executors, inputs, targets)
        return results, {name: gradient for stages in held for name, gradient in gradients_of(stages).items()}

    results, gradients = in_virtual_time(ranks, main)
    losses, expected = alone(cut_model(ranks), inputs, targets)
    assert results[-1].losses == tuple(losses)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_it_can_be_simulated_and_set_for_training() -> None:
    schedule = TwoByTwo(num_stages=2, num_microbatches=4)
    assert simulate(schedule).makespan > 0
    parallelism = ThreeDParallelismConfig(pp_size=2, num_layers=2)
    assert HybridConfig(parallelism=parallelism, micro_batches=4, schedule=schedule).schedule is schedule
    with pytest.raises(UsageError, match=r"schedule: expected .* 8"):
        HybridConfig(parallelism=parallelism, micro_batches=8, schedule=schedule)


def test_a_schedule_that_lacks_a_method_cannot_be_made() -> None:
    class Unfinished(Schedule):
        num_stages, num_microbatches, num_model_chunks = 2, 4, 1

    with pytest.raises(TypeError, match="compute_order"):
        Unfinished()  # type: ignore[abstract]


@dataclass(frozen=True, kw_only=True)
class Forgetful(TwoByTwo):
    """Leaves out the last backward pass of rank 1."""

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        order = TwoByTwo.compute_order(self, rank)
        return order[:-1] if rank == 1 else order


@dataclass(frozen=True, kw_only=True)
class Impatient(TwoByTwo):
    """Rank 0 computes backward before forward."""

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        order = TwoByTwo.compute_order(self, rank)
        return tuple(reversed(order)) if rank == 0 else order


@pytest.mark.parametrize("kind", [Forgetful, Impatient])
def test_one_that_cannot_run_is_refused_by_rank_and_operation(kind: type[TwoByTwo]) -> None:
    schedule = kind(num_stages=2, num_microbatches=2)
    with pytest.raises(InvalidSchedule, match="rank") as caught:
        check_schedule(schedule)
    assert caught.value.rank in (0, 1)
