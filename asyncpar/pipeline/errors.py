"""Errors of pipelines, and the notices of them that ranks in a common block send each other.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from asyncpar.errors import AsyncparError, PeerCancelled, PeerError, PeerLost, UsageError
from asyncpar.net.transport.links import as_reported
from asyncpar.pipeline.operation import OperationKind, PipelineOp


class InvalidSchedule(UsageError):  # noqa: N818
    """A schedule would compute something never, twice or in the wrong place, or would wait forever.

    ``rank`` and ``operation`` are the culprit: the wrong operation, or the one that should be there if it is missing.
    """

    def __init__(self, message: str, *, rank: int, operation: PipelineOp) -> None:
        super().__init__(message)
        self.rank = rank
        self.operation = operation


class ActionFailed(AsyncparError):  # noqa: N818
    """An action of this rank failed: ``kind`` of virtual stage ``stage`` on ``micro_batch``.  The reason is its cause.

    ``rank`` is in world numbering.  The other ranks get ``StepFailed`` with the same text.
    """

    def __init__(self, rank: int, operation: PipelineOp, reason: BaseException) -> None:
        place = f"rank {rank}: {operation.kind} of virtual stage {operation.stage}, micro-batch {operation.micro_batch}"
        super().__init__(f"{place}, failed: {type(reason).__name__}: {reason}")
        self.rank = rank
        self.stage = operation.stage
        self.micro_batch = operation.micro_batch
        self.kind: OperationKind = operation.kind


def principal_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the most informative error in ``group``: one of this rank before those caused by other ranks."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=_distance)


def _distance(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return 0
    return 3 if isinstance(error, PeerCancelled) else 2 if isinstance(error, PeerError) else 1


class OffloadError(AsyncparError):
    """The disk did not take offloaded data, or returned something else; the message names the data and the place."""


class StepFailed(PeerCancelled):
    """A block that ranks run together has ended because one of them failed in it, or was cancelled.

    ``rank`` is the culprit in world numbering, ``cause`` its error.  The group stays usable.
    """


class NoticeKind(StrEnum):
    """Why a rank left a block."""

    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    ECHO = "echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """``sender`` (in the group's numbering) left block ``block``; ``culprit`` is the rank of the world to blame."""

    block: int
    sender: int
    kind: NoticeKind
    culprit: int
    text: str

    @property
    def is_origin(self) -> bool:
        return self.kind is not NoticeKind.ECHO


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """The value of ``sender`` (in the group's numbering) for ``topic`` in block ``block``."""

    block: int
    sender: int
    topic: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailing:
    """A message of an alarm's channel: a notice or a word."""

    notice: Notice | None = None
    word: Word | None = None


def error_of(notice: Notice, ranks: Sequence[int], *, me: int, group: str) -> PeerError:
    """Return the error to raise for ``notice`` on rank ``me`` of a group of ``ranks`` (of the world)."""
    sender = ranks[notice.sender]
    step = f"step #{notice.block} of {group}"
    if notice.kind is NoticeKind.LOST:
        cause = as_reported(notice.text, sender)
        text = f"rank {ranks[me]}: {step}: rank {notice.culprit} is lost: {cause}"
        return PeerLost(text, rank=notice.culprit, operation=step, cause=cause)
    did = "was cancelled" if notice.kind is NoticeKind.CANCELLED else f"failed: {notice.text}"
    text = f"rank {ranks[me]}: {step} has ended: rank {sender} {did}"
    return StepFailed(text, rank=notice.culprit, operation=step, cause=notice.text)
