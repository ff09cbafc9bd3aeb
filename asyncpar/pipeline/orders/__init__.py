"""The order in which one rank computes, for each schedule: one module per family, each a generator of steps.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.pipeline.orders.looped import gpipe, interleaved, one_f1b, round_robin, sequential, zero_bubble
from asyncpar.pipeline.orders.step import ComputeStep
from asyncpar.pipeline.orders.v_shaped import dualpipe_v, zbv

__all__ = ["ComputeStep", "rank_order"]


def rank_order(
    schedule_type: PipelineScheduleType, *, rank: int, ranks: int, micro_batches: int, chunks: int
) -> Iterator[ComputeStep]:
    """Yield the computations of ``rank`` of ``ranks``; sizes are checked by the caller."""
    match schedule_type:
        case PipelineScheduleType.SEQUENTIAL:
            return sequential(micro_batches, chunks)
        case PipelineScheduleType.ROUND_ROBIN:
            return round_robin(micro_batches, chunks)
        case PipelineScheduleType.GPIPE:
            return gpipe(micro_batches, chunks)
        case PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD:
            return one_f1b(rank, ranks, micro_batches)
        case PipelineScheduleType.INTERLEAVED_ONE_F1B:
            return interleaved(rank, ranks, micro_batches, chunks)
        case PipelineScheduleType.ZERO_BUBBLE:
            return zero_bubble(rank, ranks, micro_batches, chunks)
        case PipelineScheduleType.ZBV:
            return zbv(rank, ranks, micro_batches)
        case PipelineScheduleType.DUALPIPE_V:
            return dualpipe_v(rank, ranks, micro_batches)
