"""Names of the pipeline schedules.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from asyncpar.errors import UsageError

V_CHUNKS = 2
"""Pieces of the model per rank where it goes down the ranks and back up."""


class PipelineScheduleType(StrEnum):
    """Order of forward and backward passes in a pipeline.

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

    @classmethod
    def parse(cls, name: str) -> PipelineScheduleType:
        """Return the schedule called ``name``: its value or its short name, with ``-`` or ``_``, in any case.

        Raises ``UsageError`` that lists the short names.
        """
        wanted = name.strip().lower().replace("-", "_")
        for member in cls:
            if wanted in (member.value, member.short.replace("-", "_")):
                return member
        names = ", ".join(member.short for member in cls)
        raise UsageError(f"schedule: expected one of {names}, got {name!r}")

    @property
    def short(self) -> str:
        """The name for command lines and tables."""
        return _SHORT[self]

    @property
    def is_v_shaped(self) -> bool:
        """Whether stages go from the first rank to the last and back, so that the first rank holds both ends."""
        return self in (PipelineScheduleType.ZBV, PipelineScheduleType.DUALPIPE_V)

    def chunks(self, num_model_chunks: int) -> int:
        """Return how many pieces of the model each rank holds when ``num_model_chunks`` are asked for.

        Raises ``UsageError`` for a number that the schedule cannot have.
        """
        if self.is_v_shaped:
            if num_model_chunks > V_CHUNKS:
                raise UsageError(
                    f"num_model_chunks: expected {V_CHUNKS} with {self}, got {num_model_chunks}; "
                    "interleaved_one_f1b takes more"
                )
            return V_CHUNKS
        if self is PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD and num_model_chunks != 1:
            raise UsageError(
                f"num_model_chunks: expected 1 with {self}, got {num_model_chunks}; interleaved_one_f1b takes more"
            )
        return num_model_chunks

    def stage_ranks(self, stages: int, num_model_chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank that holds each virtual stage, in the order of the model."""
        chunks = self.chunks(num_model_chunks)
        return (*range(stages), *reversed(range(stages))) if self.is_v_shaped else tuple(range(stages)) * chunks


_SHORT: Mapping[PipelineScheduleType, str] = MappingProxyType(
    {
        PipelineScheduleType.SEQUENTIAL: "sequential",
        PipelineScheduleType.ROUND_ROBIN: "round-robin",
        PipelineScheduleType.GPIPE: "gpipe",
        PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD: "1f1b",
        PipelineScheduleType.INTERLEAVED_ONE_F1B: "interleaved",
        PipelineScheduleType.ZERO_BUBBLE: "zb1p",
        PipelineScheduleType.ZBV: "zbv",
        PipelineScheduleType.DUALPIPE_V: "dualpipe-v",
    }
)
