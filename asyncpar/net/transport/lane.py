"""The interface of a lane: one ordered, reliable, full-duplex channel of frames to one peer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from asyncpar.errors import PeerLost
from asyncpar.net.wire.frame import FrameHeader, FrameKind, FrameSink, Payload

MAX_FRAME_BYTES = 1 << 36
"""Longest payload that a lane accepts.  What lands is bounded by what was posted; this bounds what is dropped."""


class CarriedBytes(NamedTuple):
    """What a channel has carried so far: ``nbytes`` that arrived, in the ``seconds`` in which it had to carry any.

    Time in which the peer took no more is not among them.  ``is_full``: there is more to send than it takes just now.
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
        """Bytes that the channel has not taken; 0 where that is not known."""
        return 0

    @abstractmethod
    def release(self) -> bool:
        """Give the memory back before this returns; ``done`` is cancelled.

        A frame that has begun to travel still goes out whole and as it was (from a copy of its rest); one that has not
        is dropped.  True if the frame goes out, or went; False if the peer will never see it.
        """


LENT_KINDS = frozenset({FrameKind.BULK, FrameKind.STRIPED})
"""Frames whose payloads stay in the sender's memory; all others are copied if they have to wait."""


class LaneEvents(FrameSink, Protocol):
    """Events of a lane, for its owner.  All calls come on the event loop and never block."""

    def lost(self, cause: str) -> PeerLost:
        """Report that the channel ended, for any reason; called once.  Returns the error for pending sends.

        Never called after ``Lane.close``.
        """
        ...


class Lane(ABC):
    """One channel to one peer.

    Frames arrive in the order in which they were sent, each exactly once, until the lane is lost.
    """

    kind: str
    """``inproc``, ``shm``, ``tcp``, ``grpc``: what users write after ``--transport``."""

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
        """Bytes of the payload that is arriving which have not come; 0 where payloads come whole."""
        return 0

    @property
    def round_trip(self) -> float | None:
        """The least round trip seen lately, in seconds; None where the channel does not know it."""
        return None

    @property
    def delivery(self) -> CarriedBytes | None:
        """What the channel has carried so far; None where it does not know."""
        return None

    @abstractmethod
    def start(self, events: LaneEvents) -> None:
        """Begin to deliver frames to ``events``.  Nothing is delivered before."""

    @abstractmethod
    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        """Hand one frame to the channel, which was started; None if ``payload`` may be reused at once.

        ``payload`` holds ``header.length`` bytes (format ``B``), contiguous or in segments.  Only a BULK frame ever
        returns a ``Sending``: all others are small, and are copied if the channel cannot take them now.  Once the
        channel has ended, frames vanish.
        """

    @abstractmethod
    def divert(self) -> None:
        """Forget the memory lent for the frame that is arriving: its other bytes are dropped, ``landed`` not called."""

    @abstractmethod
    def abort(self, error: PeerLost) -> None:
        """Close at once and drop what is queued: pending sends end with ``error``.  Idempotent.  No event follows.

        All lent memory is given back before this returns.
        """

    @abstractmethod
    async def close(self) -> None:
        """Flush what was sent (for at most a second), then close.  Idempotent.  No event follows."""


def fail_future(future: asyncio.Future[None], error: BaseException) -> None:
    """End ``future`` with ``error`` unless it has ended; asyncio does not warn if it is never awaited."""
    if not future.done():
        future.set_exception(error)
        future.exception()
