"""What ranks that run a block together tell each other.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from asyncpar.core.records import dataclass
from asyncpar.errors import PeerCancelled, PeerError, PeerLost


class StepFailed(PeerCancelled):
    """A block that ranks run together has ended because one of them failed in it, or was cancelled.

    ``rank`` is the culprit in world numbering, ``cause`` what happened there.  The group stays usable.
    """


class NoticeKind(StrEnum):
    """Why a rank left a block."""

    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    ECHO = "echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """``sender`` (in the group's numbering) left block ``block``; ``culprit`` is the world's rank that is the cause."""

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
    """What ``sender`` (in the group's numbering) has to say about ``topic`` in block ``block``."""

    block: int
    sender: int
    topic: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailing:
    """What goes through the channel of an alarm: one of the two."""

    notice: Notice | None = None
    word: Word | None = None


def error_of(notice: Notice, ranks: Sequence[int], *, me: int, group: str) -> PeerError:
    """Return the error that ``notice`` is to rank ``me`` of a group of ``ranks`` (of the world)."""
    sender = ranks[notice.sender]
    step = f"step #{notice.block} of {group}"
    if notice.kind is NoticeKind.LOST:
        cause = f"{notice.text} (reported by rank {sender})"
        text = f"rank {ranks[me]}: {step}: rank {notice.culprit} is lost: {cause}"
        return PeerLost(text, rank=notice.culprit, operation=step, cause=cause)
    did = "was cancelled" if notice.kind is NoticeKind.CANCELLED else f"failed: {notice.text}"
    text = f"rank {ranks[me]}: {step} has ended: rank {sender} {did}"
    return StepFailed(text, rank=notice.culprit, operation=step, cause=notice.text)
