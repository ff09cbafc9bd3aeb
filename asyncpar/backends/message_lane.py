"""The message lane: frames over a channel of messages, such as MPI's, whatever carries them.

Frames are packed into messages of limited length; frames that wait together travel together.  Bytes are copied
into a message on one side and out of it on the other, piece by piece within the cache.  Handing the user's memory to
the channel instead would save that, but such a channel does not give memory back before it has finished with it, for
which it may need a peer that hangs; and whoever cancels an operation gets their array back at once.
"""

from __future__ import annotations

import asyncio

from asyncpar.backends.courier import Courier
from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.transport.lane import MAX_FRAME_BYTES, Lane, LaneEvents, Sending
from asyncpar.transport.queue import SendQueue
from asyncpar.wire.header import HEADER_BYTES, FrameHeader, encode_header
from asyncpar.wire.reader import FrameReader
from asyncpar.wire.segments import Payload, views_of
from asyncpar.wire.sink import WholeSink

FLUSH_SECONDS = 1.0
_MAX_SEGMENTS = 256


class MessageLane(Lane):
    """A lane over ``courier``, which it owns."""

    def __init__(self, courier: Courier, *, kind: str) -> None:
        self.kind = kind
        self._courier = courier
        self._limit = courier.message_bytes
        self._queue = SendQueue()
        self._writer = self._queue.writer
        self._reader: FrameReader | None = None
        self._events: LaneEvents | None = None
        self._is_open = True
        self._is_closing = False
        self._has_peer_ended = False
        self._through: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bytes_sent = self._bytes_received = 0

    # -- Lane --------------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_received

    def start(self, events: LaneEvents) -> None:
        self._events = events
        accept = events.accept if isinstance(events, WholeSink) else None
        self._reader = FrameReader(events, max_length=MAX_FRAME_BYTES, accept=accept)
        self._courier.open(self)

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        if not self._is_open or self._is_closing:
            return None
        head, views = encode_header(header), views_of(payload)
        size = HEADER_BYTES + len(payload)
        self._bytes_sent += size
        if not self._writer and not self._courier.is_full and size <= self._limit and len(views) < _MAX_SEGMENTS:
            self._courier.post([head, *views])
            return None
        sending = self._queue.push(header, head, payload)
        self._post_waiting()
        if self._queue.is_overfull:
            self._lose("the peer does not read: too many small frames wait for it")
        return None if sending is None or sending.is_through else sending

    def divert(self) -> None:
        if self._reader is not None:
            self._reader.divert()

    def abort(self, error: PeerLost) -> None:
        if self._is_open:
            self._shut()
            self._queue.fail(error)

    async def close(self) -> None:
        if not self._is_open or self._is_closing:
            return
        self._is_closing = True
        self._events = None
        if self._reader is None:
            self._courier.open(self)
        else:
            self._reader.stop()
        self._post_waiting()
        try:
            await asyncio.wait({self._through}, timeout=FLUSH_SECONDS)
        finally:
            self.abort(PeerLost("the lane was closed before this was sent", cause="closed"))

    # -- Receiver ----------------------------------------------------------------------------------------------------

    def arrived(self, message: memoryview) -> None:
        if self._events is None or self._reader is None:
            return
        self._bytes_received += len(message)
        try:
            self._reader.feed(message)
        except ProtocolError as error:
            self._lose(f"protocol error: {error}")

    def ended(self) -> None:
        self._has_peer_ended = True
        if self._is_closing:
            self._post_waiting()
        elif self._reader is not None and not self._reader.is_between_frames:
            self._lose("the peer closed the channel in the middle of a frame")
        else:
            self._lose("the peer closed the channel")

    def has_room(self) -> None:
        if self._is_open:
            self._post_waiting()

    def broke(self, cause: str) -> None:
        self._lose(cause)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _post_waiting(self) -> None:
        """Post as much as there is room for; when closing, see whether that was all."""
        while self._writer and not self._courier.is_full:
            segments = self._writer.segments(self._limit)
            self._courier.post(segments)
            self._writer.advance(sum(map(len, segments)))
        if self._is_closing and not self._writer:
            self._courier.end()
            if self._courier.is_idle and self._has_peer_ended and not self._through.done():
                self._through.set_result(None)

    def _lose(self, cause: str) -> None:
        """The channel ended; tell the owner once."""
        if not self._is_open:
            return
        events = self._events
        self._shut()
        self._queue.fail(PeerLost(cause, cause=cause) if events is None else events.lost(cause))

    def _shut(self) -> None:
        self._is_open = False
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._courier.end()
        self._courier.stop()
        if not self._through.done():
            self._through.set_result(None)
