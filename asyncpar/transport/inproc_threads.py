"""The inproc lane between event loops: ranks of one process whose loops run in different threads.

Theory of operation.  Each end belongs to the loop of its rank.  A frame that is sent is copied once and put in the
queue of the other end, whose loop is woken unless it has been already; it delivers what is there in one callback.  The
end of a channel travels in the same queue, behind what was sent before.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.transport.lane import Lane, LaneEvents, Sending
from asyncpar.wire.header import HEADER_BYTES, FrameHeader
from asyncpar.wire.segments import Payload, write_payload

_CLOSED = "the peer closed its end"
_NO_LOOP = "the event loop of its thread is closed"


class ThreadLane(Lane):
    """One end of a channel between two loops.  All but ``_put`` is called on the loop of this end."""

    kind = "inproc"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._peer: ThreadLane = self
        self._events: LaneEvents | None = None
        self._queue: deque[tuple[FrameHeader, bytes] | str] = deque()
        """Frames, and in the end the cause for which there are no more."""
        self._lock = threading.Lock()
        self._is_woken = False
        self._is_over = False
        self._bytes_sent = self._bytes_received = 0

    @staticmethod
    def pair(loop: asyncio.AbstractEventLoop, other_loop: asyncio.AbstractEventLoop) -> tuple[ThreadLane, ThreadLane]:
        """Return the two ends of a new channel, each for its loop."""
        one, other = ThreadLane(loop), ThreadLane(other_loop)
        one._peer, other._peer = other, one
        return one, other

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_received

    def start(self, events: LaneEvents) -> None:
        self._events = events
        self._drain()

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        if not self._is_over:
            self._bytes_sent += HEADER_BYTES + len(payload)
            if not self._peer._put((header, bytes(payload))):
                self._put(_NO_LOOP)
        return None

    def divert(self) -> None:
        """Nothing is ever half delivered here."""

    def abort(self, error: PeerLost) -> None:  # noqa: ARG002
        self._part(_CLOSED)

    async def close(self) -> None:
        self._part(_CLOSED)

    def cut(self, cause: str) -> None:
        """End the channel as a failing network would: both sides learn ``cause``."""
        self._peer._put(cause)
        self._put(cause)

    def _part(self, cause: str) -> None:
        """End the channel from this side: no event follows here; the other side gets what was sent, then ``cause``."""
        if not self._is_over:
            self._is_over, self._events = True, None
            self._queue.clear()
            self._peer._put(cause)

    def _put(self, item: tuple[FrameHeader, bytes] | str) -> bool:
        """Hand ``item`` to this end, from any thread; False if its loop is closed."""
        self._queue.append(item)
        with self._lock:
            if self._is_woken:
                return True
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            return False
        return True

    def _drain(self) -> None:
        """Deliver what has come, then the end if it came."""
        with self._lock:
            self._is_woken = False
        while self._queue and (events := self._events) is not None:
            item = self._queue.popleft()
            if isinstance(item, str):
                self._is_over, self._events = True, None
                events.lost(item)
            else:
                self._deliver(events, *item)

    def _deliver(self, events: LaneEvents, header: FrameHeader, payload: bytes) -> None:
        self._bytes_received += HEADER_BYTES + len(payload)
        try:
            landing = events.lend(header)
            if landing is not None and self._events is events:
                write_payload(memoryview(payload), landing)
                events.landed(header)
        except ProtocolError as error:
            cause = f"protocol error: {error}"
            self._part(cause)
            events.lost(cause)
