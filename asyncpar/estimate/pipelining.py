"""The time and idle time of a pipeline by simulation, and the activations that it keeps.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.pipeline.operation import OperationKind, PipelineOp
from asyncpar.pipeline.schedule import PipelineSchedule, Schedule
from asyncpar.pipeline.simulation import simulate

_FULL_PERIODS = 3
"""Number of micro-batches, as a multiple of the stages, beyond which more of them only lengthen the middle."""

_MANY_PERIODS = 64
"""The same for kept activations if the number of micro-batches is not a multiple of the stages."""

_FORWARDS_FIRST = (PipelineScheduleType.GPIPE, PipelineScheduleType.SEQUENTIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds that one virtual stage takes for each pass of one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFigures:
    """``makespan`` is the time of one step, ``ideal`` the compute time of the busiest rank, in seconds."""

    makespan: float
    ideal: float

    @property
    def bubble_over_ideal(self) -> float:
        """Lost time as a part of the ideal, as in the Megatron papers."""
        return (self.makespan - self.ideal) / self.ideal if self.ideal else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Lost time as a part of the makespan, as in the GPipe paper."""
        return (self.makespan - self.ideal) / self.makespan if self.makespan else 0.0


def pipeline_figures(schedule: Schedule, work: Sequence[StageWork], *, latency: float = 0.0) -> PipelineFigures:
    """Return the times of ``schedule`` if its virtual stages do ``work`` and each hop between ranks takes ``latency``.

    Long ones are not simulated to the end: each further round of as many micro-batches as stages takes the time of the
    last simulated one.  That is exact if all stages take equally long and micro-batches are a multiple of them, and a
    few percent off otherwise.  Schedules from outside the package are simulated to their end.
    """
    if len(work) != schedule.num_virtual_stages:
        raise UsageError(f"work: expected that of {schedule.num_virtual_stages} virtual stages, got {len(work)}")
    if not isinstance(schedule, PipelineSchedule):
        return _simulated(schedule, work, latency)
    stages, count = schedule.num_stages, schedule.num_microbatches
    simulated = min(count, _FULL_PERIODS * stages + count % stages)
    figures = _simulated(replace(schedule, num_microbatches=simulated), work, latency)
    if count == simulated:
        return figures
    earlier = _simulated(replace(schedule, num_microbatches=simulated - stages), work, latency)
    rounds = (count - simulated) // stages
    ideal = figures.ideal + rounds * (figures.ideal - earlier.ideal)
    makespan = figures.makespan + rounds * (figures.makespan - earlier.makespan)
    return PipelineFigures(makespan=max(makespan, ideal), ideal=ideal)


def peak_bytes(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """Return, for each rank, its peak bytes if a micro-batch leaves ``kept`` bytes in each virtual stage.

    They are kept from the forward pass until the backward pass, or its weight half, is done.  If all forward passes
    come first that is everything; otherwise whole rounds in the middle, which are all alike, are left out, except for
    schedules from outside the package.
    """
    if len(kept) != schedule.num_virtual_stages:
        raise UsageError(f"kept: expected bytes for {schedule.num_virtual_stages} virtual stages, got {len(kept)}")
    stages, count = schedule.num_stages, schedule.num_microbatches
    if isinstance(schedule, PipelineSchedule):
        if schedule.schedule_type in _FORWARDS_FIRST:
            sums = (sum(kept[piece] for piece in schedule.virtual_stages_of(rank)) for rank in range(stages))
            return tuple(count * each for each in sums)
        rounds, rest = divmod(count, stages)
        shorter = min(rounds, _MANY_PERIODS if rest else _FULL_PERIODS) * stages + rest
        schedule = replace(schedule, num_microbatches=shorter)
    return tuple(_peak(schedule.compute_order(rank), kept) for rank in range(stages))


def _simulated(schedule: Schedule, work: Sequence[StageWork], latency: float) -> PipelineFigures:
    simulation = simulate(schedule, costs=lambda operation: _seconds(operation, work), latency=latency)
    return PipelineFigures(makespan=simulation.makespan, ideal=simulation.ideal)


def _seconds(operation: PipelineOp, work: Sequence[StageWork]) -> float:
    stage = work[operation.stage]
    match operation.kind:
        case OperationKind.FORWARD:
            return stage.forward
        case OperationKind.BACKWARD_INPUT:
            return stage.backward_input
        case OperationKind.BACKWARD_WEIGHT:
            return stage.backward_weight
        case _:
            return stage.backward_input + stage.backward_weight


def _peak(order: Sequence[PipelineOp], sizes: Sequence[float]) -> float:
    kept = peak = 0.0
    for operation in order:
        if operation.kind is OperationKind.FORWARD:
            kept += sizes[operation.stage]
            peak = max(peak, kept)
        elif operation.kind.frees_activation:
            kept -= sizes[operation.stage]
    return peak
