"""The interface of a lane: one ordered, reliable, full-duplex channel of frames to one peer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from asyncpar.errors import PeerLost
from asyncpar.net.wire.frame import FrameHeader, FrameKind, FrameSink, Payload

MAX_FRAME_BYTES = 1 << 36
"""Longest payload that a lane accepts.  Delivered bytes are bounded by posted receives; this bounds dropped ones."""


class CarriedBytes(NamedTuple):
    """The traffic of a channel so far: ``nbytes`` delivered, in the ``seconds`` in which there were any to deliver.

    Time in which the peer accepted no more is excluded.  ``is_full``: there is currently more to send than it accepts.
    """

    nbytes: int
    seconds: float
    is_full: bool


class Sending(ABC):
    """A send whose payload memory is still in use.

    ``done`` ends when the memory may be reused: with None, or with ``PeerLost``.
    """

    __slots__ = ("done",)

    done: asyncio.Future[None]

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the channel has not accepted yet; 0 if that is not known."""
        return 0

    @abstractmethod
    def release(self) -> bool:
        """Release the memory before this returns; ``done`` is cancelled.

        A frame that is partly sent still goes out whole and unchanged (from a copy of its rest); one that is not is
        dropped.  Returns True if the frame goes or went out, False if the peer will never see it.
        """


LENT_KINDS = frozenset({FrameKind.BULK, FrameKind.STRIPED})
"""Frames whose payloads stay in the sender's memory; all others are copied if they must wait."""


class LaneEvents(FrameSink, Protocol):
    """Events of a lane, for its owner.  All are called on the event loop and never block."""

    def lost(self, cause: str) -> PeerLost:
        """Report the end of the channel, for any reason; called once.  Returns the error for pending sends.

        Never called after ``Lane.close``.
        """
        ...


class Lane(ABC):
    """One channel to one peer.

    Frames arrive in the order in which they were sent, each exactly once, until the lane is lost.
    """

    kind: str
    """``inproc``, ``shm``, ``tcp``, ``grpc``: the name that users write after ``--transport``."""

    _bytes_sent = _bytes_received = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames, headers included, handed to the channel."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of frames, headers included, taken from the channel."""
        return self._bytes_received

    @property
    def missing_bytes(self) -> int:
        """Bytes still missing from the arriving payload; 0 if payloads arrive whole."""
        return 0

    @property
    def round_trip(self) -> float | None:
        """The shortest round trip seen recently, in seconds; None if the channel does not know it."""
        return None

    @property
    def delivery(self) -> CarriedBytes | None:
        """The traffic of the channel so far; None if it does not know."""
        return None

    @abstractmethod
    def start(self, events: LaneEvents) -> None:
        """Start to deliver frames to ``events``.  Nothing is delivered before."""

    @abstractmethod
    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        """Hand one frame to the started channel; return None if ``payload`` may be reused at once.

        ``payload`` holds ``header.length`` bytes (format ``B``), contiguous or in segments.  Only a BULK frame ever
        returns a ``Sending``: all others are small, and are copied if the channel cannot take them now.  Once the
        channel has ended, frames are discarded.
        """

    @abstractmethod
    def divert(self) -> None:
        """Stop writing to the memory lent for the arriving frame: drop its other bytes, and do not call ``landed``."""

    @abstractmethod
    def abort(self, error: PeerLost) -> None:
        """Close at once and drop queued frames: pending sends end with ``error``.  Idempotent.  No event follows.

        All lent memory is given back before this returns.
        """

    @abstractmethod
    async def close(self) -> None:
        """Flush sent frames (for at most a second), then close.  Idempotent.  No event follows."""


def fail_future(future: asyncio.Future[None], error: BaseException) -> None:
    """End ``future`` with ``error`` unless it has ended; asyncio does not warn if it is never awaited."""
    if not future.done():
        future.set_exception(error)
        future.exception()
