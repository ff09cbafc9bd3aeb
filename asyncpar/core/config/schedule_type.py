"""Pipeline schedules by name, and the placement of the model's parts on ranks in each.  Pure.

A configuration holds the name of a schedule.  ``SCHEDULES`` has a record for each name; ``pipeline/registry.py`` adds
records from outside the package, and makes schedules by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from asyncpar.core.config.registry import Registry
from asyncpar.errors import UsageError

V_CHUNKS = 2
"""Pieces of the model per rank in a schedule that runs down the ranks and back up."""


class PipelineScheduleType(StrEnum):
    """Names of the schedules in the package: orders of forward and backward passes in a pipeline.

    SEQUENTIAL: all forwards, then backwards in reverse.  GPIPE: the same with backwards first in, first out.
    ROUND_ROBIN: one micro-batch at a time.  The others interleave the two to save memory or idle time.
    """

    SEQUENTIAL = "sequential"
    ROUND_ROBIN = "round_robin"
    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "one_forward_one_backward"
    INTERLEAVED_ONE_F1B = "interleaved_one_f1b"
    ZERO_BUBBLE = "zero_bubble"
    ZBV = "zbv"
    DUALPIPE_V = "dualpipe_v"


class ScheduleRecord(ABC):
    """The facts about a schedule that a configuration needs: its names, and the ranks of its stages."""

    name: str

    @property
    @abstractmethod
    def short(self) -> str:
        """The name for command lines and tables."""

    @abstractmethod
    def chunks(self, num_model_chunks: int) -> int:
        """Return the number of pieces of the model on each rank when ``num_model_chunks`` are requested.

        Raises ``UsageError`` for a number that the schedule cannot have.
        """

    @abstractmethod
    def stage_ranks(self, stages: int, num_model_chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank that holds each virtual stage, in the order of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedSchedule(ScheduleRecord):
    """The record of a schedule of the package; ``pipeline/orders`` has the order of its operations.

    Stages go round the ranks once per chunk, from first to last; or, if it ``is_v_shaped``, from the first rank to the
    last and back, so the first rank holds both ends.  ``takes_chunks``: each rank may hold several pieces.
    """

    name: str
    short: str
    is_v_shaped: bool = False
    takes_chunks: bool = True

    def chunks(self, num_model_chunks: int) -> int:
        most = V_CHUNKS if self.is_v_shaped else num_model_chunks if self.takes_chunks else 1
        if num_model_chunks > most:
            raise UsageError(
                f"num_model_chunks: expected {most} with {self.name}, got {num_model_chunks}; "
                "interleaved_one_f1b takes more"
            )
        return most

    def stage_ranks(self, stages: int, num_model_chunks: int) -> tuple[int, ...]:
        chunks = self.chunks(num_model_chunks)
        return (*range(stages), *reversed(range(stages))) if self.is_v_shaped else tuple(range(stages)) * chunks


SCHEDULES: Registry[ScheduleRecord] = Registry(
    "schedule",
    (
        ShippedSchedule(name=PipelineScheduleType.SEQUENTIAL.value, short="sequential"),
        ShippedSchedule(name=PipelineScheduleType.ROUND_ROBIN.value, short="round-robin"),
        ShippedSchedule(name=PipelineScheduleType.GPIPE.value, short="gpipe"),
        ShippedSchedule(name=PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD.value, short="1f1b", takes_chunks=False),
        ShippedSchedule(name=PipelineScheduleType.INTERLEAVED_ONE_F1B.value, short="interleaved"),
        ShippedSchedule(name=PipelineScheduleType.ZERO_BUBBLE.value, short="zb1p"),
        ShippedSchedule(name=PipelineScheduleType.ZBV.value, short="zbv", is_v_shaped=True),
        ShippedSchedule(name=PipelineScheduleType.DUALPIPE_V.value, short="dualpipe-v", is_v_shaped=True),
    ),
    reserved=("1f1b", "interleaved", "zb1p", "round-robin", "dualpipe-v"),
)
"""The schedules by name; ``pipeline.register_schedule`` adds one."""


def schedule_record(name: str) -> ScheduleRecord:
    """Return the record of the schedule called ``name``.  Raises ``UsageError`` that lists the names."""
    record = SCHEDULES.get(name)
    if record is None:
        raise UsageError(f"schedule: expected one of {', '.join(SCHEDULES.names)}, got {name!r}")
    return record


def check_schedule_name(setting: str, name: object) -> PipelineScheduleType | str:
    """Return ``name`` if a schedule has that name, as a ``PipelineScheduleType`` if it is one.

    Raises ``UsageError`` that names the ``setting`` and lists the names.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise UsageError(f"{setting}: expected one of {', '.join(SCHEDULES.names)}, got {name!r}")
    return PipelineScheduleType(name) if name in list(PipelineScheduleType) else name


def parse_schedule_name(text: str) -> PipelineScheduleType | str:
    """Return the name of the schedule that ``text`` spells: its name or short name, with ``-`` or ``_``, in any case.

    Raises ``UsageError`` that lists the short names.
    """
    wanted = text.strip().lower().replace("-", "_")
    for record in SCHEDULES:
        if wanted in (record.name.replace("-", "_"), record.short.replace("-", "_")):
            return check_schedule_name("schedule", record.name)
    raise UsageError(f"schedule: expected one of {', '.join(record.short for record in SCHEDULES)}, got {text!r}")
