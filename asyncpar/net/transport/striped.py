"""Several connections as one lane: a large payload is sent over all of them at once.

Theory of operation.  The first connection carries every frame, in order, except that a large BULK payload is sent as a
STRIPED frame: its header over several connections, each with one part of the payload (see ``wire.frame``).  The
receiver asks its owner for memory when the header arrives over the first connection; then each connection reads its
part straight into that memory.  A connection that is ahead (its next part belongs to a frame that the first has not
announced yet, or its part is complete) is held: it reads nothing.  The first is held behind a STRIPED frame until all
parts are there; so frames are delivered in the order in which they were sent.  No connection waits for another to
*send*, so nothing can deadlock: the parts of the oldest incomplete frame can always be read.

The connections share their fate: when one ends, the lane ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.connection import Connection
from asyncpar.net.transport.lane import Lane, LaneEvents, Sending, fail_future
from asyncpar.net.transport.protection import DAMAGED
from asyncpar.net.transport.queue import QueuedSending
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Payload, parts_of, share_of, stripe


class StripedSending(Sending):
    """A payload of which parts wait on some connections (``parts``), while others are sent (None)."""

    __slots__ = ("_is_lost", "_parts", "_waiting")

    def __init__(self, parts: Sequence[QueuedSending | None], done: asyncio.Future[None]) -> None:
        self.done = done
        self._parts = parts
        self._is_lost = False
        waiting = [part for part in parts if part is not None]
        self._waiting = len(waiting)
        for part in waiting:
            part.done.add_done_callback(self._part_ended)

    @property
    def waiting_bytes(self) -> int:
        return sum(part.waiting_bytes for part in self._parts if part is not None)

    def release(self) -> bool:
        self.done.cancel()
        if self._is_lost:
            return False
        goes_out = any(part is None or part.has_begun for part in self._parts)
        for part in self._parts:
            if part is not None and goes_out:
                part.keep()
            elif part is not None:
                part.release()
        return goes_out

    def lose(self, error: PeerLost) -> None:
        """End all waiting parts: the lane has ended."""
        self._is_lost = True
        if not all(part is None or part.is_through for part in self._parts):
            fail_future(self.done, error)

    def _part_ended(self, part: asyncio.Future[None]) -> None:
        self._waiting -= 1
        error = None if part.cancelled() else part.exception()
        if error is not None:
            fail_future(self.done, error)
        elif self._waiting == 0 and not self.done.done():
            self.done.set_result(None)


class _Arrival:
    """The arriving STRIPED frame: its memory (None: dropped), and the parts that have not begun or ended."""

    __slots__ = ("header", "not_begun", "not_ended", "parts", "target")

    def __init__(self, header: FrameHeader, target: memoryview | None, parts: int) -> None:
        self.header = header
        self.target = target
        self.parts = parts
        self.not_begun = set(range(parts))
        self.not_ended = parts


class StripedLane(Lane):
    """A lane over connections made for it, in the order on which both sides agreed."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.kind = connections[0].kind
        self.connections = tuple(connections)
        self._first = connections[0]
        self._loop = asyncio.get_running_loop()
        self._events: LaneEvents | None = None
        self._arrival: _Arrival | None = None
        self._sendings: dict[StripedSending, None] = {}
        self._end: PeerLost | None = None

    # -- Lane --------------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        return sum(connection.bytes_sent for connection in self.connections)

    @property
    def bytes_received(self) -> int:
        return sum(connection.bytes_received for connection in self.connections)

    @property
    def missing_bytes(self) -> int:
        arrival = self._arrival
        if arrival is None:
            return self._first.missing_bytes
        parts = [stripe(arrival.header.length, arrival.parts, index) for index in range(arrival.parts)]
        return sum(
            stop - start if index in arrival.not_begun else self.connections[index].missing_bytes
            for index, (start, stop) in enumerate(parts)
        )

    @property
    def round_trip(self) -> float | None:
        return self._first.round_trip

    def start(self, events: LaneEvents) -> None:
        self._events = events
        for index, connection in enumerate(self.connections):
            if self._end is None:
                connection.start_part(_Part(self, index))

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        count = parts_of(len(payload), len(self.connections))
        if header.kind is not FrameKind.BULK or count == 1:
            return self._first.send(header, payload)
        header = header._replace(kind=FrameKind.STRIPED)
        parts: list[QueuedSending | None] = []
        for index, connection in enumerate(self.connections[:count]):
            start, stop = stripe(len(payload), count, index)
            parts.append(connection.send(header, payload[start:stop]))
        if not any(parts):
            return None
        sending = StripedSending(parts, self._loop.create_future())
        self._sendings[sending] = None
        sending.done.add_done_callback(lambda _: self._sendings.pop(sending, None))
        return sending

    def divert(self) -> None:
        arrival = self._arrival
        if arrival is None:
            self._first.divert()
            return
        arrival.target = None
        for connection in self.connections:
            connection.divert()

    def abort(self, error: PeerLost) -> None:
        if self._end is None:
            self._shut(error)

    async def close(self) -> None:
        if self._end is not None:
            return
        self._events = None
        self.divert()
        self._arrival = None
        error = PeerLost("the lane was closed before this was sent", cause="closed")
        try:
            await self._first.close()  # the peer reads to its end only once it has all earlier parts
        finally:
            self.abort(error)

    # -- events of the connections -----------------------------------------------------------------------------------

    def part_lent(self, index: int, header: FrameHeader) -> memoryview | None:
        """Return the memory for the share of a frame that begins on connection ``index``."""
        if index == 0:
            if header.kind is not FrameKind.STRIPED:
                return None if self._events is None else self._events.lend(header)
            self._announced(header)
        elif header.kind is not FrameKind.STRIPED:
            raise ProtocolError(f"frame kind: expected STRIPED on connection {index}, got {header.kind.name}")
        arrival = self._arrival
        if arrival is None or index not in arrival.not_begun:
            self.connections[index].hold()
            return None
        if header != arrival.header:
            raise ProtocolError(f"connection {index}: expected its part of {arrival.header}, got one of {header}")
        arrival.not_begun.discard(index)
        start, stop = stripe(header.length, arrival.parts, index)
        return None if arrival.target is None else arrival.target[start:stop]

    def part_landed(self, header: FrameHeader) -> None:
        """Handle a whole frame that came over a single connection."""
        if header.kind is not FrameKind.STRIPED and self._events is not None:
            self._events.landed(header)

    def part_ended(self, index: int, header: FrameHeader) -> None:
        """Note that the share of a frame is complete on connection ``index``."""
        arrival = self._arrival
        if header.kind is not FrameKind.STRIPED or arrival is None:
            return
        arrival.not_ended -= 1
        if arrival.not_ended > 0:
            if index == 0:
                self._first.hold()
            return
        self._arrival = None
        if arrival.target is not None and self._events is not None:
            self._events.landed(header._replace(kind=FrameKind.BULK))
        if index > 0:
            self._first.resume()

    def part_lost(self, cause: str) -> PeerLost:
        """End the lane because a connection ended; after damage only once the peer has been notified."""
        if self._end is None:
            events, self._events = self._events, None
            self._end = PeerLost(cause, cause=cause)  # later steps may ask for it
            error = self._end if events is None else events.lost(cause)
            self._shut(error, gently=cause.startswith(DAMAGED))
        return self._end

    # -- inside ------------------------------------------------------------------------------------------------------

    def _announced(self, header: FrameHeader) -> None:
        """Begin to assemble a payload that arrives in parts."""
        assert self._arrival is None, "the first connection went on before all parts were there"
        count = parts_of(header.length, len(self.connections))
        if count == 1:
            raise ProtocolError(f"{header.length} bytes came in parts")
        target = None if self._events is None else self._events.lend(header._replace(kind=FrameKind.BULK))
        if self._end is not None:
            return
        self._arrival = _Arrival(header, target, count)
        for connection in self.connections[1:count]:
            connection.resume()

    def _shut(self, error: PeerLost, *, gently: bool = False) -> None:
        self._end = error
        self._events = None
        self._arrival = None
        for connection in self.connections:
            if gently:
                connection.leave(error)
            else:
                connection.abort(error)
        for sending in list(self._sendings):
            sending.lose(error)


class _Part:
    """One connection of a striped lane, as its ``PartEvents``."""

    __slots__ = ("_index", "_lane")

    def __init__(self, lane: StripedLane, index: int) -> None:
        self._lane = lane
        self._index = index

    def share(self, header: FrameHeader) -> int:
        return share_of(header, len(self._lane.connections), self._index)

    def lend(self, header: FrameHeader) -> memoryview | None:
        return self._lane.part_lent(self._index, header)

    def landed(self, header: FrameHeader) -> None:
        self._lane.part_landed(header)

    def ended(self, header: FrameHeader) -> None:
        self._lane.part_ended(self._index, header)

    def lost(self, cause: str) -> PeerLost:
        return self._lane.part_lost(cause)
