"""The interface of a lane: one ordered, reliable, full-duplex channel of frames to one peer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from asyncpar.errors import PeerLost
from asyncpar.wire.header import FrameHeader
from asyncpar.wire.sink import FrameSink


class Sending(ABC):
    """A send whose payload memory is still in use.

    ``done`` ends when the memory may be reused: with None, or with ``PeerLost``.
    """

    __slots__ = ("done",)

    done: asyncio.Future[None]

    @abstractmethod
    def release(self) -> None:
        """Give the memory back before this returns; ``done`` is cancelled.

        A frame that has begun to travel still goes out whole and as it was (from a copy of its rest); one that has not
        is dropped.
        """


class LaneEvents(FrameSink, Protocol):
    """What a lane tells its owner.  All calls come on the event loop and never block."""

    def lost(self, cause: str) -> PeerLost:
        """The channel ended, for whatever reason; called once.  Returns the error for pending sends.

        Never called after ``Lane.close``.
        """
        ...


class Lane(ABC):
    """One channel to one peer.

    Frames arrive in the order in which they were sent, each exactly once, until the lane is lost.
    """

    kind: ClassVar[str]
    """``inproc``, ``tcp``, ``grpc``: what users write after ``--transport``."""

    bytes_sent: int = 0
    bytes_received: int = 0
    """Bytes of frames (headers included) handed to and taken from the channel."""

    @abstractmethod
    def start(self, events: LaneEvents) -> None:
        """Begin to deliver frames to ``events``.  Nothing is delivered before."""

    @abstractmethod
    def send(self, header: FrameHeader, payload: memoryview) -> Sending | None:
        """Hand one frame to the channel; None if ``payload`` may be reused at once.

        ``payload`` holds ``header.length`` contiguous bytes (format ``B``).  Control frames may be sent without looking
        at the result: their payload is never reused.
        """

    @abstractmethod
    def divert(self) -> None:
        """Forget the memory lent for the frame that is arriving: its other bytes are dropped, ``landed`` not called."""

    @abstractmethod
    async def close(self) -> None:
        """Flush what was sent (for at most a second), then close.  Idempotent.  No event follows."""
