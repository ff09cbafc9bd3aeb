"""The end of an actor and its reason, for the actor itself and for watchers.  No I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from asyncpar.actors.runtime.failure import brief
from asyncpar.actors.runtime.message import CLOSED, STOPPED
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import ActorDown, AsyncparError, NodeClosed


class DownReason(enum.StrEnum):
    """Reason for the end of an actor."""

    STOPPED = "stopped"
    """It was stopped, or stopped itself."""
    FAILED = "failed"
    """It failed; ``Actor`` defines what counts as a failure."""
    KILLED = "killed"
    """It was killed."""
    CLOSED = "closed"
    """Its node was closed."""
    LOST = "lost"
    """Its rank was lost."""
    MISSING = "missing"
    """There was no such actor."""


@dataclass(frozen=True, slots=True)
class Down:
    """The end of an actor.  ``error`` is a ``RemoteError`` if it failed, ``PeerLost`` if its rank was lost."""

    ref: ActorRef[Any]
    reason: DownReason
    error: AsyncparError | None = None


class End(enum.IntEnum):
    """Ways to end an actor; the greatest requested one applies."""

    STOP = 1
    """Handle waiting messages, then end."""
    CLOSE = 2
    """The node closes: interrupt the endpoint, refuse waiting messages, run ``on_stop``."""
    FAIL = 3
    """The actor failed: the same as ``CLOSE``."""
    KILL = 4
    """Interrupt the endpoint, refuse waiting messages, do not run ``on_stop``."""


_REASONS: Final = {
    End.STOP: DownReason.STOPPED,
    End.CLOSE: DownReason.CLOSED,
    End.FAIL: DownReason.FAILED,
    End.KILL: DownReason.KILLED,
}


class Ending:
    """The pending end of one actor: the strongest request so far, and the errors."""

    __slots__ = ("end", "error", "has_begun", "is_retired", "is_urgent", "stop_error")

    def __init__(self) -> None:
        self.end: End | None = None
        self.has_begun = False
        """Whether the actor accepts no more messages."""
        self.is_urgent = False
        """Whether the actor does not handle waiting messages."""
        self.is_retired = False
        """Whether it ends because its node is about to close, which callers are notified of, if nothing stronger
        comes."""
        self.error: BaseException | None = None
        """The error with which the actor failed."""
        self.stop_error: BaseException | None = None
        """The error that ``on_stop`` raised."""

    def begin(self, end: End, error: BaseException | None = None) -> None:
        """Record that the actor ends by ``end``, unless it already ends by something stronger."""
        if self.end is None or end > self.end:
            self.end = end
            self.has_begun = True
            self.is_urgent = end > End.STOP
            self.error = self.error if error is None else error

    @property
    def reason(self) -> DownReason:
        """The reason for the actor's end, as reported to watchers."""
        if self.refusal == CLOSED:
            return DownReason.CLOSED
        return _REASONS[self.end or End.STOP]

    @property
    def exit_reason(self) -> str:
        """The reason for the actor's end, as text."""
        if self.refusal == CLOSED:
            return "the node was closed"
        match self.end:
            case End.KILL:
                return "the actor was killed"
            case End.FAIL:
                return f"the actor failed: {brief(self.error)}"
        return "the actor was stopped"

    def start_error(self, ref: ActorRef[Any]) -> BaseException:
        """Return the error of a spawn of ``ref`` if the actor ended before it was ready."""
        if self.error is not None:
            return self.error
        if self.refusal == CLOSED:
            return NodeClosed.of(ref.rank)
        return ActorDown(f"actor {ref.name!r}: {self.exit_reason} before it had started", rank=ref.rank)

    @property
    def refusal(self) -> str:
        """The reason, one of those in ``message``, with which calls are refused."""
        return CLOSED if self.end is End.CLOSE or (self.is_retired and self.end is End.STOP) else STOPPED
