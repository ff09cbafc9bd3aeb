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
        """Return how many bytes of the payload come over this connection."""
        ...

    def ended(self, header: FrameHeader) -> None:
        """Handle the end of the share of a frame, landed or dropped."""
        ...


class Connection(Lane):
    """A lane by itself, or one connection of a striped lane."""

    @abstractmethod
    def start_part(self, part: PartEvents) -> None:
        """Begin to deliver, like ``start``, frames of which perhaps only a share comes over this connection."""

    @abstractmethod
    def send(self, header: FrameHeader, payload: Payload) -> QueuedSending | None:
        """See ``Lane.send``.  The payload of a STRIPED frame is this connection's share."""

    @abstractmethod
    def hold(self) -> None:
        """Deliver no further frame for now; inside ``lend``: nor this one, which will be lent for again."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after ``hold``; otherwise do nothing."""

    @abstractmethod
    def leave(self, error: PeerLost) -> None:
        """Close without waiting for it: pending sends end with ``error``, what was sent goes out, for a second at most.

        All lent memory is given back before this returns, and no event follows.  Idempotent.
        """


def as_connection(lane: Lane) -> Connection:
    """Return ``lane``, which can be part of another one.  Raises ``UsageError`` if it cannot."""
    if not isinstance(lane, Connection):
        raise UsageError(f"lane {lane.kind!r}: is_striped: its lanes are no Connection; make them one, or leave it out")
    return lane
