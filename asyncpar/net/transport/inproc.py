"""The inproc lane: ranks of one process pass frames to each other without serializing them.

Two ranks on one loop deliver inside ``send`` (``InprocLane``).  Two ranks on loops of different threads use a
``ThreadLane``: each end belongs to the loop of its rank; a frame is copied once when sent and put in the queue of the
other end, whose loop is woken unless it already has been; it delivers all waiting frames in one callback.  The end of
the channel goes through the same queue, after the frames sent before it.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque

import msgspec

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.lane import Lane, LaneEvents, Sending
from asyncpar.net.transport.links import LEFT, Connector, Links
from asyncpar.net.wire.frame import HEADER_BYTES, FrameHeader, Payload, write_payload

_CLOSED = "the peer closed its end"
_NO_LOOP = "the event loop of its thread is closed"


class _LocalLane(Lane):
    """One end of a channel inside this process."""

    kind = "inproc"

    def __init__(self) -> None:
        self._events: LaneEvents | None = None

    def start(self, events: LaneEvents) -> None:
        self._events = events
        self._drain()

    def divert(self) -> None:
        """Do nothing: frames are delivered as a whole."""

    def abort(self, error: PeerLost) -> None:  # noqa: ARG002
        self._part(_CLOSED)

    async def close(self) -> None:
        self._part(_CLOSED)

    @abstractmethod
    def cut(self, cause: str) -> None:
        """End the channel as a failing network would: both sides learn ``cause``."""

    @abstractmethod
    def _part(self, cause: str) -> None:
        """End the channel from this side: no event follows here; the other side gets sent frames, then ``cause``."""

    @abstractmethod
    def _drain(self) -> None:
        """Deliver waiting frames, then the end of the channel if it has arrived."""

    def _land(self, events: LaneEvents, header: FrameHeader, payload: Payload) -> None:
        """Deliver one frame.  Raises ``ProtocolError`` if it is refused."""
        self._bytes_received += HEADER_BYTES + len(payload)
        landing = events.lend(header)
        if landing is not None and self._events is events:
            write_payload(payload, landing)
            events.landed(header)


class ThreadLane(_LocalLane):
    """One end of a channel between two loops.  All but ``_put`` is called on the loop of this end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._peer: ThreadLane = self
        self._queue: deque[tuple[FrameHeader, bytes] | str] = deque()
        """Frames, followed by the cause why there are no more."""
        self._lock = threading.Lock()
        self._is_woken = False
        self._is_over = False

    @staticmethod
    def pair(loop: asyncio.AbstractEventLoop, other_loop: asyncio.AbstractEventLoop) -> tuple[ThreadLane, ThreadLane]:
        """Return the two ends of a new channel, each for its loop."""
        one, other = ThreadLane(loop), ThreadLane(other_loop)
        one._peer, other._peer = other, one
        return one, other

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        if not self._is_over:
            self._bytes_sent += HEADER_BYTES + len(payload)
            if not self._peer._put((header, bytes(payload))):
                self._put(_NO_LOOP)
        return None

    def cut(self, cause: str) -> None:
        self._peer._put(cause)
        self._put(cause)

    def _part(self, cause: str) -> None:
        if not self._is_over:
            self._is_over, self._events = True, None
            self._queue.clear()
            self._peer._put(cause)

    def _put(self, item: tuple[FrameHeader, bytes] | str) -> bool:
        """Pass ``item`` to this end, from any thread; return False if its loop is closed."""
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
        try:
            self._land(events, header, memoryview(payload))
        except ProtocolError as error:
            cause = f"protocol error: {error}"
            self._part(cause)
            events.lost(cause)


_MAX_DEPTH = 8
"""How deep deliveries may nest (a frame answered inside its delivery) before the rest goes through the loop."""


class InprocLane(_LocalLane):
    """One end of a channel on one loop.  Delivery happens inside ``send``, so payloads are copied exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self._peer: InprocLane | None = None
        self._waiting: deque[tuple[FrameHeader, bytes]] = deque()
        self._depth = 0
        self._end: str | None = None
        self._is_closed = False

    @staticmethod
    def pair() -> tuple[InprocLane, InprocLane]:
        """Return the two ends of a new channel."""
        one, other = InprocLane(), InprocLane()
        one._peer, other._peer = other, one
        return one, other

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        peer = self._peer
        if peer is not None:
            self._bytes_sent += HEADER_BYTES + len(payload)
            peer._arrive(header, payload)
        return None

    def cut(self, cause: str) -> None:
        peer = self._peer
        self._lose(cause)
        if peer is not None:
            peer._lose(cause)

    def _part(self, cause: str) -> None:
        self._is_closed = True
        self._waiting.clear()
        peer, self._peer, self._events = self._peer, None, None
        if peer is not None:
            peer._peer = None
            peer._end = cause
            peer._drain()

    def _lose(self, cause: str) -> None:
        events = self._events
        if not self._is_closed and self._end is None:
            self._part(cause)
            if events is not None:
                events.lost(cause)
            else:
                self._is_closed, self._end = False, cause  # not started yet: ``start`` reports it

    def _arrive(self, header: FrameHeader, payload: Payload) -> None:
        if self._events is None or self._waiting or self._depth >= _MAX_DEPTH:
            if self._depth >= _MAX_DEPTH and not self._waiting:
                asyncio.get_running_loop().call_soon(self._drain)
            self._waiting.append((header, bytes(payload)))
        else:
            self._deliver(self._events, header, payload)

    def _drain(self) -> None:
        while self._waiting and self._events is not None and self._depth == 0:
            header, payload = self._waiting.popleft()
            self._deliver(self._events, header, memoryview(payload))
        if self._end is not None and not self._waiting and self._events is not None and self._depth == 0:
            events, self._events = self._events, None
            self._is_closed = True
            events.lost(self._end)

    def _deliver(self, events: LaneEvents, header: FrameHeader, payload: Payload) -> None:
        self._depth += 1
        try:
            self._land(events, header, payload)
        except ProtocolError as error:
            self._lose(f"protocol error: {error}")
        finally:
            self._depth -= 1
        if self._depth == 0 and self._end is not None:
            self._drain()


class _RankLinks(msgspec.Struct, frozen=True):
    """The links of a rank, and the loop on which they are used."""

    links: Links
    loop: asyncio.AbstractEventLoop


class InprocFabric:
    """Joins the nodes of one in-process world, whose loops may run in different threads.  Pass one fabric to all."""

    def __init__(self) -> None:
        self._places: dict[int, _RankLinks] = {}
        self._ends: dict[tuple[int, int], ThreadLane] = {}
        """Ends of channels between loops that have not been adopted yet, by (rank, peer)."""
        self._joined: set[frozenset[int]] = set()
        self._lock = threading.Lock()

    def join(self, links: Links) -> None:
        """Make ``links``, which belong to the running loop, reachable for the other ranks."""
        self._places[links.rank] = _RankLinks(links, asyncio.get_running_loop())

    def leave(self, rank: int) -> None:
        """Make ``rank`` unreachable: ranks that connect from now on learn that it is lost."""
        self._places.pop(rank, None)

    def connect(self, links: Links, rank: int) -> None:
        """Bring up the link between ``links``, which belong to the running loop, and ``rank``.

        Raises ``PeerLost`` if it is no longer there.
        """
        place = self._places.get(rank)
        if place is not None and place.links.is_closing:
            raise PeerLost(f"rank {rank}: {LEFT}", rank=rank, cause=LEFT)
        if place is None:
            raise PeerLost(f"rank {rank} is not in this process any more", rank=rank, cause="it left the process")
        loop = asyncio.get_running_loop()
        if place.loop is loop:
            one, other = InprocLane.pair()
            links.adopt(rank, one)
            place.links.adopt(links.rank, other)
            return
        with self._lock:  # both ranks may connect at once
            ranks = frozenset((links.rank, rank))
            if ranks not in self._joined:
                self._joined.add(ranks)
                here, there = ThreadLane.pair(loop, place.loop)
                self._ends.update({(links.rank, rank): here, (rank, links.rank): there})
        self._adopt(links, rank)
        try:
            place.loop.call_soon_threadsafe(self._adopt, place.links, links.rank)
        except RuntimeError:
            raise PeerLost(
                f"rank {rank} is not in this process any more",
                rank=rank,
                cause="the event loop of its thread is closed",
            ) from None

    def _adopt(self, links: Links, peer: int) -> None:
        """Attach to ``links`` their end of the channel to ``peer``, unless they have it; called on their loop."""
        with self._lock:
            end = self._ends.pop((links.rank, peer), None)
        if end is not None:
            links.adopt(peer, end)


class InprocConnector(Connector):
    """Connects ranks over a fabric."""

    def __init__(self, fabric: InprocFabric) -> None:
        self._fabric = fabric

    async def connect(self, links: Links, rank: int) -> None:
        if not links.is_up(rank):
            self._fabric.connect(links, rank)

    def default_lane(self, rank: int) -> str:  # noqa: ARG002
        return "inproc"
