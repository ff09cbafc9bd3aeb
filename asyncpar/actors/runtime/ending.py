"""Why and how an actor ends.  Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from asyncpar.actors.runtime.failure import brief
from asyncpar.actors.runtime.message import CLOSED, STOPPED
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import AsyncparError


class DownReason(enum.StrEnum):
    """Why an actor is gone."""

    STOPPED = "stopped"
    """It was stopped, or left, in good order."""
    FAILED = "failed"
    """It failed: see ``Actor`` for what counts as a failure."""
    KILLED = "killed"
    """It was killed."""
    CLOSED = "closed"
    """Its node was closed."""
    LOST = "lost"
    """Its rank is gone."""
    MISSING = "missing"
    """There was no such actor."""


@dataclass(frozen=True, slots=True)
class Down:
    """An actor is gone.  ``error`` says what went wrong: ``RemoteError`` if it failed, ``PeerLost`` if it was lost."""

    ref: ActorRef[Any]
    reason: DownReason
    error: AsyncparError | None = None


class End(enum.IntEnum):
    """What ends an actor; the greater one wins."""

    STOP = 1
    """Handle what waits, then end."""
    CLOSE = 2
    """The node closes: interrupt, refuse what waits, run ``on_stop``."""
    FAIL = 3
    """It failed: the same."""
    KILL = 4
    """Interrupt, refuse what waits, and that is all."""


_REASONS: Final = {
    End.STOP: DownReason.STOPPED,
    End.CLOSE: DownReason.CLOSED,
    End.FAIL: DownReason.FAILED,
    End.KILL: DownReason.KILLED,
}


class Ending:
    """What is known of the end of one actor."""

    __slots__ = ("end", "error", "stop_error")

    def __init__(self) -> None:
        self.end: End | None = None
        self.error: BaseException | None = None
        """Why it failed."""
        self.stop_error: BaseException | None = None
        """What ``on_stop`` raised."""

    @property
    def has_begun(self) -> bool:
        """Does the actor take no messages any more?"""
        return self.end is not None

    @property
    def is_urgent(self) -> bool:
        """Does it not even handle what waits?"""
        return self.end is not None and self.end > End.STOP

    def begin(self, end: End, error: BaseException | None = None) -> None:
        """Let the actor end by ``end``, unless it does by something stronger."""
        if self.end is None or end > self.end:
            self.end = end
            self.error = self.error if error is None else error

    @property
    def reason(self) -> DownReason:
        """How it ended, for others."""
        return _REASONS[self.end or End.STOP]

    @property
    def exit_reason(self) -> str:
        """How it ended, for people."""
        match self.end:
            case End.CLOSE:
                return "the node was closed"
            case End.KILL:
                return "the actor was killed"
            case End.FAIL:
                return f"the actor failed: {brief(self.error)}"
        return "the actor was stopped"

    @property
    def refusal(self) -> str:
        """The reason, of those in ``message``, that callers get."""
        return CLOSED if self.end is End.CLOSE else STOPPED
