"""The interface of a lane that can be one of several connections of a larger one (see ``striped``)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from asyncpar.errors import PeerLost, UsageError
from asyncpar.net.transport.lane import Lane, LaneEvents
from asyncpar.net.transport.queue import QueuedSending
from asyncpar.net.wire.frame import FrameHeader, Payload


class PartEvents(LaneEvents, Protocol):
    """Events of a connection that carries frames together with other connections."""

    def share(self, header: FrameHeader) -> int:
        """Return the number of bytes of the payload that come over this connection."""
        ...

    def ended(self, header: FrameHeader) -> None:
        """Handle the end of the share of a frame, landed or dropped."""
        ...


class Connection(Lane):
    """A lane by itself, or one connection of a striped lane."""

    @abstractmethod
    def start_part(self, part: PartEvents) -> None:
        """Start to deliver, like ``start``, frames of which possibly only a share comes over this connection."""

    @abstractmethod
    def send(self, header: FrameHeader, payload: Payload) -> QueuedSending | None:
        """See ``Lane.send``.  The payload of a STRIPED frame is this connection's share."""

    @abstractmethod
    def hold(self) -> None:
        """Deliver no further frame for now; inside ``lend``: nor this one, for which ``lend`` will be called again."""

    @abstractmethod
    def resume(self) -> None:
        """Resume delivery after ``hold``; otherwise do nothing."""

    @abstractmethod
    def leave(self, error: PeerLost) -> None:
        """Close without waiting: pending sends end with ``error``; sent frames are flushed, for a second at most.

        All lent memory is given back before this returns, and no event follows.  Idempotent.
        """


def as_connection(lane: Lane) -> Connection:
    """Return ``lane`` as a connection that can be part of another lane.  Raises ``UsageError`` if it cannot."""
    if not isinstance(lane, Connection):
        raise UsageError(f"lane {lane.kind!r}: is_striped: its lanes are no Connection; make them one, or leave it out")
    return lane
