"""Pipeline schedules: the order in which each rank computes, sends and receives.  Pure data."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

from asyncpar.core.config.schedule_type import PipelineScheduleType, schedule_record
from asyncpar.errors import UsageError
from asyncpar.pipeline.dependencies import with_messages
from asyncpar.pipeline.layout import StageLayout, check_index
from asyncpar.pipeline.operation import PipelineOp
from asyncpar.pipeline.orders import rank_order

_DIGEST_LENGTH = 16


class Schedule(ABC):
    """The operations of all ranks of a pipeline in one step; equal arguments give equal schedules on all ranks.

    ``num_stages`` counts ranks (physical stages); each holds ``num_model_chunks`` of the virtual stages, which the
    model is cut into.
    """

    __slots__ = ()

    num_stages: int
    num_microbatches: int
    num_model_chunks: int

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in reports."""

    @property
    @abstractmethod
    def layout(self) -> StageLayout:
        """The rank that holds each virtual stage."""

    @abstractmethod
    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        """Return the computations of ``rank``, in order, without sends and receives."""

    def get_stage_schedule(self, stage: int) -> tuple[PipelineOp, ...]:
        """Return all operations of the rank of the physical stage ``stage``, in order.

        Receives precede the operation that needs their message, sends follow the one that made it.  Between two virtual
        stages of the same rank nothing is sent or received.
        """
        check_index("stage", stage, self.num_stages)
        return tuple(with_messages(self.compute_order(stage), self.layout))

    def place_of(self, rank: int, action: int) -> str:
        """Return the name in errors of an action of ``compute_order(rank)``."""
        return f"rank {rank}, action {action} ({self.compute_order(rank)[action]})"

    def row_of(self, rank: int) -> str:
        """Return the name in errors of a rank of this schedule."""
        return f"{self.name}: rank {rank}"

    @property
    def num_virtual_stages(self) -> int:
        return self.layout.num_virtual_stages

    def rank_of(self, virtual: int) -> int:
        """Return the rank that holds a virtual stage."""
        return self.layout.rank_of(virtual)

    def chunk_of(self, virtual: int) -> int:
        """Return the place of a virtual stage among those of its rank."""
        return self.layout.chunk_of(virtual)

    def virtual_stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank, by chunk."""
        return self.layout.virtual_stages_of(rank)

    def digest(self) -> str:
        """Return a short hash of the layout and all orders: ranks whose digests are equal run the same schedule."""
        lines = [f"{self.num_microbatches};" + ",".join(map(str, self.layout.ranks))]
        lines += [",".join(map(str, self.compute_order(rank))) for rank in range(self.num_stages)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGEST_LENGTH]


@dataclass(frozen=True, slots=True)
class PipelineSchedule(Schedule):
    """One of the built-in schedules, for any number of ranks and micro-batches.

    ``num_model_chunks`` may be more than 1 for all but ONE_FORWARD_ONE_BACKWARD (INTERLEAVED_ONE_F1B is its variant
    with chunks).  ZBV and DUALPIPE_V always have two chunks per rank: rank ``r`` of ``p`` holds virtual stages ``r``
    and ``2 p - 1 - r``; there the default of 1 becomes 2.
    """

    num_stages: int
    num_microbatches: int
    schedule_type: PipelineScheduleType
    num_model_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches", "num_model_chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}: expected a whole number from 1, got {value!r}")
        try:
            object.__setattr__(self, "schedule_type", PipelineScheduleType(self.schedule_type))
        except ValueError:
            names = ", ".join(PipelineScheduleType)
            raise UsageError(
                f"schedule_type: expected one of {names}, got {self.schedule_type!r}; others: make_schedule"
            ) from None
        chunks = schedule_record(self.schedule_type).chunks(self.num_model_chunks)
        object.__setattr__(self, "num_model_chunks", chunks)

    @property
    def name(self) -> str:
        return str(self.schedule_type)

    @property
    def layout(self) -> StageLayout:
        return _layout(self)

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        check_index("rank", rank, self.num_stages)
        return _compute_order(self, rank)


@lru_cache(maxsize=256)
def _layout(schedule: PipelineSchedule) -> StageLayout:
    ranks = schedule_record(schedule.schedule_type).stage_ranks(schedule.num_stages, schedule.num_model_chunks)
    return StageLayout(ranks=ranks, num_stages=schedule.num_stages)


@lru_cache(maxsize=256)
def _compute_order(schedule: PipelineSchedule, rank: int) -> tuple[PipelineOp, ...]:
    virtual = _layout(schedule).virtual_stages_of(rank)
    steps = rank_order(
        schedule.schedule_type,
        rank=rank,
        ranks=schedule.num_stages,
        micro_batches=schedule.num_microbatches,
        chunks=schedule.num_model_chunks,
    )
    return tuple(
        PipelineOp(kind=step.kind, stage=virtual[step.chunk], micro_batch=step.micro_batch, chunk=step.chunk)
        for step in steps
    )
