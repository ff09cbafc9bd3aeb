"""Schedules for tests: those of the golden table, and drawn ones of every type and many sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.pipeline import CustomSchedule, PipelineSchedule, Schedule, StageLayout
from asyncpar.pipeline.operation import OperationKind, PipelineOp

_GOLDENS = Path(__file__).parents[1] / "goldens" / "schedules.json"
_TYPES = {
    "GPipe": Type.GPIPE,
    "1F1B": Type.ONE_FORWARD_ONE_BACKWARD,
    "Interleaved1F1B": Type.INTERLEAVED_ONE_F1B,
    "InterleavedZeroBubble": Type.ZERO_BUBBLE,
    "ZBVZeroBubble": Type.ZBV,
    "DualPipeV": Type.DUALPIPE_V,
}
V_SHAPED = (Type.ZBV, Type.DUALPIPE_V)
WITH_CHUNKS = (Type.SEQUENTIAL, Type.ROUND_ROBIN, Type.GPIPE, Type.INTERLEAVED_ONE_F1B, Type.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One entry of the table: orders by rank, in cells, and the figures of their simulation."""

    title: str
    schedule_type: Type | None
    num_stages: int
    num_microbatches: int
    num_model_chunks: int
    order: tuple[tuple[str, ...], ...]
    figures: Mapping[str, float]
    peaks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.title}-p{self.num_stages}-v{self.num_model_chunks}-m{self.num_microbatches}"

    def ours(self) -> Schedule:
        """The built-in schedule of the entry, or, where there is none, a custom one of its cells."""
        if self.schedule_type is None:
            return CustomSchedule(self.order, name=self.title)
        return PipelineSchedule(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            schedule_type=self.schedule_type,
            num_model_chunks=self.num_model_chunks,
        )


def goldens() -> list[Golden]:
    """All entries of the table."""
    return [
        Golden(
            title=entry["schedule"],
            schedule_type=_TYPES.get(entry["schedule"]),
            num_stages=entry["p"],
            num_microbatches=entry["m"],
            num_model_chunks=entry["v"],
            order=tuple(tuple(entry["order"][str(rank)]) for rank in range(entry["p"])),
            figures={
                name: entry[name]
                for name in (
                    "makespan",
                    "ideal_per_rank",
                    "bubble_over_ideal",
                    "bubble_fraction_of_makespan",
                    "span_bubble",
                )
            },
            peaks=tuple(entry["peak_inflight_chunks"]),
        )
        for entry in json.loads(_GOLDENS.read_text())["schedules"]
    ]


def cells_of(schedule: Schedule) -> list[list[str]]:
    """The rows of a schedule file."""
    return [[str(operation) for operation in schedule.compute_order(rank)] for rank in range(schedule.num_stages)]


@st.composite
def built_in_schedules(
    draw: st.DrawFn, *, least_ranks: int = 1, least_micro_batches: int = 1, types: Sequence[Type] = tuple(Type)
) -> PipelineSchedule:
    """Any built-in schedule of up to 6 ranks, 4 chunks and 16 micro-batches."""
    schedule_type = draw(st.sampled_from(types))
    return PipelineSchedule(
        num_stages=draw(st.integers(least_ranks, 6)),
        num_microbatches=draw(st.integers(least_micro_batches, 16)),
        schedule_type=schedule_type,
        num_model_chunks=draw(st.integers(1, 4)) if schedule_type in WITH_CHUNKS else 1,
    )


class HandMade(Schedule):
    """A schedule of given orders, with sends and receives as given, that nothing has checked."""

    def __init__(
        self,
        orders: Sequence[Sequence[PipelineOp]],
        layout: StageLayout,
        *,
        num_microbatches: int,
        full: Mapping[int, Sequence[PipelineOp]] | None = None,
    ) -> None:
        self._orders = orders
        self._layout = layout
        self._full = full or {}
        self.num_stages = layout.num_stages
        self.num_microbatches = num_microbatches
        self.num_model_chunks = layout.num_model_chunks

    @property
    def name(self) -> str:
        return "hand-made"

    @property
    def layout(self) -> StageLayout:
        return self._layout

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        return tuple(self._orders[rank])

    def get_stage_schedule(self, stage: int) -> tuple[PipelineOp, ...]:
        return tuple(self._full[stage]) if stage in self._full else super().get_stage_schedule(stage)


def changed(schedule: Schedule, rank: int, operations: Sequence[PipelineOp]) -> HandMade:
    """``schedule`` with other operations on one rank, sends and receives among them."""
    return HandMade(
        [schedule.compute_order(one) for one in range(schedule.num_stages)],
        schedule.layout,
        num_microbatches=schedule.num_microbatches,
        full={rank: operations},
    )


def reordered(schedule: Schedule, rank: int, order: Sequence[PipelineOp]) -> HandMade:
    """``schedule`` with other computation on one rank."""
    orders = [order if one == rank else schedule.compute_order(one) for one in range(schedule.num_stages)]
    return HandMade(orders, schedule.layout, num_microbatches=schedule.num_microbatches)


def forward(stage: int, micro_batch: int) -> PipelineOp:
    """A forward pass of a stage that is chunk 0 of its rank."""
    return PipelineOp(kind=OperationKind.FORWARD, stage=stage, micro_batch=micro_batch)


def backward(stage: int, micro_batch: int) -> PipelineOp:
    """A whole backward pass of a stage that is chunk 0 of its rank."""
    return PipelineOp(kind=OperationKind.BACKWARD, stage=stage, micro_batch=micro_batch)
