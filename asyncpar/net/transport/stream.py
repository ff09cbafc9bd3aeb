"""The stream lane: one connected socket, TCP or Unix, written from user memory and read straight into it.

Reading is asyncio's ``BufferedProtocol``, whose buffers come from the frame reader.  Writing bypasses the transport: a
frame is sent by one vectored ``writev`` on a duplicate of the socket's descriptor, at once if nothing waits before it;
the rest that the kernel does not take is queued, uncopied, and continued when the descriptor is writable.  Small
messages are many: those of one turn of the loop are sent together (see ``WriteCoalescer``).  (The duplicate is needed
because an event loop does not watch a descriptor that belongs to one of its transports.)
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connection import Connection, PartEvents
from asyncpar.net.transport.lane import LENT_KINDS, MAX_FRAME_BYTES, CarriedBytes, LaneEvents
from asyncpar.net.transport.positions import TICK_SECONDS, Positions
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.queue import QueuedSending, SendQueue
from asyncpar.net.transport.sockets import Pulse, count_unacknowledged, read_delivery, read_round_trip
from asyncpar.net.wire.frame import (
    MESSAGE_GROUP,
    POSITION,
    SEALED_BYTES,
    TAIL_BYTES,
    FrameHeader,
    FrameKind,
    Payload,
    PayloadChecksum,
    WholeSink,
    encode_header,
    views_of,
)
from asyncpar.net.wire.reader import FrameReader

WRITE_BYTES = 1024 * 1024
"""Most bytes per system call, so that one huge payload does not starve the loop's other work."""

SMALL_BYTES = 128 * 1024
"""Data sent or received in pieces of at most this size may be answered soon."""

MAX_SEGMENTS = 256
"""Most pieces per system call; the system's limit is 1024."""

FLUSH_SECONDS = 1.0
"""Seconds for which a lane that is closed waits for a peer that takes nothing, or does not close."""

_PATIENCE_SECONDS = 2.0
"""Seconds for which bytes may be in transit between the two hosts' kernels; see ``positions``."""


GATHERED_BYTES: Final = 1500
"""Most bytes, about, of messages sent together: ten or so, which makes the system call cheap.

More would keep the peer waiting, which could already be working on the first of them.
"""


class StreamLane(Connection, asyncio.BufferedProtocol):
    """A lane over a connected socket whose handshake is complete.

    Make it in a protocol callback of ``transport``, whose reading must be paused; it becomes the protocol.
    ``duplicate`` is a non-blocking duplicate of the transport's socket, which the lane then owns.  ``pulse`` detects a
    dead peer where the socket does not; None for a Unix socket, which always does.  ``busy_poll`` may keep the loop
    awake for answers to small frames.  ``protection`` is that of the connection.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        duplicate: socket.socket,
        *,
        kind: str,
        busy_poll: BusyPoll,
        protection: Protection,
        pulse: Pulse | None = None,
    ) -> None:
        self.kind = kind
        self._protection = protection
        self._sealer = protection.sealer
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._socket = duplicate
        self._descriptor = self._socket.fileno()
        self._queue = SendQueue(self._sealer)
        self._writer = self._queue.writer
        self._is_watching = False
        self._gatherer = WriteCoalescer(self._send_gathered)
        self._reader: FrameReader | None = None
        self._events: LaneEvents | None = None
        self._discard: memoryview | None = None
        self._is_open = True
        self._is_leaving = False
        self._broken: str | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._busy_poll = busy_poll
        self._pulse = pulse
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick) if protection.may_damage else None
        self._positions = Positions(patience=_PATIENCE_SECONDS)
        self._bytes_written = 0
        transport.set_protocol(self)

    # -- Lane, Connection --------------------------------------------------------------------------------------------

    @property
    def missing_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.missing_bytes

    @property
    def round_trip(self) -> float | None:
        return read_round_trip(self._socket)

    @property
    def delivery(self) -> CarriedBytes | None:
        return read_delivery(self._socket)

    def start(self, events: LaneEvents) -> None:
        accept = events.accept if isinstance(events, WholeSink) else None
        self._start(
            events,
            FrameReader(
                events,
                max_length=MAX_FRAME_BYTES,
                accept=accept,
                verifier=self._protection.verifier,
                on_position=self._receive_position,
            ),
        )

    def start_part(self, part: PartEvents) -> None:
        reader = FrameReader(
            part,
            max_length=MAX_FRAME_BYTES,
            share=part.share,
            ended=part.ended,
            verifier=self._protection.verifier,
            on_position=self._receive_position,
        )
        self._start(part, reader)

    def send(self, header: FrameHeader, payload: Payload) -> QueuedSending | None:
        if not self._is_open or self._is_leaving or (self._broken is not None and header.kind not in LENT_KINDS):
            return None
        head = self._sealer.seal(encode_header(header))
        checksum = self._sealer.begin_payload(head, len(payload))
        size = SEALED_BYTES + len(payload) + (0 if checksum is None else TAIL_BYTES)
        self._bytes_sent += size
        may_wait = header.group == MESSAGE_GROUP and header.kind is FrameKind.EAGER
        is_free = not self._writer.waiting_bytes and self._broken is None
        if may_wait and is_free and self._gatherer.add(head, payload, checksum):
            return None
        if self._gatherer.waiting:
            self._gatherer.flush()
        written = 0
        if not self._writer.waiting_bytes and self._broken is None:
            if size <= SMALL_BYTES:
                self._busy_poll.expect()  # before the call, during which the peer may already run
            written = self._write(_first_segments(head, payload, checksum))
            if written == size:
                return None
        sending = self._queue.push(header, head, payload, taken=written, checksum=checksum)
        self._await_room()
        return sending

    def divert(self) -> None:
        if self._reader is not None:
            self._reader.divert()

    def hold(self) -> None:
        if self._is_open and self._reader is not None:
            self._reader.hold()
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._is_open or self._reader is None or not self._reader.is_held:
            return
        try:
            is_free = self._reader.resume()
        except ProtocolError as error:
            self._refuse(error)
        else:
            if is_free and self._is_open:
                self._transport.resume_reading()

    def abort(self, error: PeerLost) -> None:
        if self._is_open:
            self._shut(error)
            self._transport.abort()

    def leave(self, error: PeerLost) -> None:
        if not self._is_open or self._is_leaving:
            return
        self._is_leaving = True
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._reader = None
        self._transport.resume_reading()
        self._gatherer.flush()
        self._queue.release_all(error)
        self._stop_timer()
        self._timer = self._loop.call_later(FLUSH_SECONDS, self.abort, error)
        if not self._writer.waiting_bytes and self._broken is None:
            self._finish_writing()

    async def close(self) -> None:
        if not self._is_open or self._flushed is not None:
            return
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._gatherer.flush()
        self._flushed = self._loop.create_future()
        try:
            if self._writer.waiting_bytes and self._broken is None:
                await self._queue.flush(self._flushed, FLUSH_SECONDS)
            if self._is_open:
                self._finish_writing()
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._gone
        except TimeoutError:
            pass  # the peer does not read, or does not close: it had its time
        finally:
            self.abort(PeerLost("the lane was closed before this was sent", cause="closed"))

    # -- asyncio.BufferedProtocol ------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        if self._reader is not None:
            return self._reader.buffer()
        if self._discard is None:
            self._discard = memoryview(bytearray(4096))
        return self._discard

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        if reader is None or self._events is None:
            return
        self._bytes_received += nbytes
        self._busy_poll.arrived()
        try:
            reader.advance(nbytes)
        except ProtocolError as error:
            self._refuse(error)
        if nbytes <= SMALL_BYTES:
            self._busy_poll.expect()

    def eof_received(self) -> None:
        """Let the transport close itself; ``connection_lost`` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._lose(f"the connection broke: {_describe(exc)}")
        elif self._reader is not None and not self._reader.is_between_frames:
            self._lose("the peer closed the connection in the middle of a frame")
        else:
            self._lose(self._broken or "the peer closed the connection")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, events: LaneEvents, reader: FrameReader) -> None:
        self._events = events
        if not self._is_open:
            events.lost(self._broken or "the connection closed before it was used")
            return
        self._reader = reader
        self._transport.resume_reading()

    def _write(self, segments: Sequence[bytes | bytearray | memoryview]) -> int:
        """Pass bytes to the kernel and return the number that it took."""
        try:
            written = os.writev(self._descriptor, segments)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._break(f"the connection broke: {_describe(error)}")
            return 0
        self._bytes_written += written
        return written

    def _send_gathered(self, frames: bytearray) -> None:
        if not self._is_open or self._broken is not None:
            return
        self._busy_poll.expect()
        written = 0 if self._writer.waiting_bytes else self._write([frames])
        if written < len(frames):
            self._queue.push_owned(frames, taken=written)
            self._await_room()

    def _await_room(self) -> None:
        """Continue with the queue as soon as the descriptor is writable."""
        if self._queue.is_overfull:
            self._break("the peer does not read: too many small frames wait for it")
        elif not self._is_watching and self._broken is None:
            self._is_watching = True
            self._loop.add_writer(self._descriptor, self._continue)

    def _continue(self) -> None:
        """Write from the queue: the descriptor is writable."""
        if self._writer.waiting_bytes:
            self._writer.advance(self._write([*self._writer.segments(WRITE_BYTES)]))
        if not self._writer.waiting_bytes and self._is_open:
            self._stop_watching()
            if self._flushed is not None and not self._flushed.done():
                self._flushed.set_result(None)
            if self._is_leaving:
                self._finish_writing()

    def _break(self, cause: str) -> None:
        """Stop writing; data that has already arrived is still read before the loss is reported."""
        if self._broken is None:
            self._broken = cause
            self._stop_watching()
            if self._flushed is not None and not self._flushed.done():
                self._flushed.set_result(None)
            if not self._is_leaving:
                self._stop_timer()
                self._timer = self._loop.call_later(FLUSH_SECONDS, self._lose, cause)

    def _finish_writing(self) -> None:
        """Half-close, and read on until the peer closes: closing over unread bytes would reset data in flight."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._broken = self._broken or _describe(error)
        self._reader = None
        self._transport.resume_reading()

    def _tick(self) -> None:
        """Check, once a second, whether the peer's host lives, and whether all bytes arrive."""
        if not self._is_open or self._is_leaving:
            return
        if self._pulse is not None and self._pulse.is_silent():
            self._lose("the peer's host does not answer")
            return
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        reader, now = self._reader, self._loop.time()
        if count_unacknowledged(self._socket) == 0:
            self._positions.mark(now, self._bytes_written)
        is_in_frame = reader is not None and not reader.is_between_frames
        is_reading = reader is not None and not reader.is_held
        if self._positions.tick(
            now,
            sent=self._bytes_sent,
            received=self._bytes_received,
            is_in_frame=is_in_frame,
            is_reading=is_reading,
        ):
            self._send_position()

    def _send_position(self) -> None:
        """Send the number of bytes received, unless other frames wait, which also show that this side lives."""
        if self._writer.waiting_bytes or self._broken is not None or self._gatherer.waiting:
            return
        head = self._sealer.seal(encode_header(POSITION._replace(sequence=self._bytes_received)))
        written = self._write([head])
        if written < len(head):
            self._queue.push_owned(head, taken=written)
            self._await_room()

    def _receive_position(self, position: int) -> None:
        self._positions.receive(self._loop.time(), position, written=self._bytes_written)

    def _refuse(self, error: ProtocolError) -> None:
        """End the lane after bytes that violate the protocol, and report the reason to both ends."""
        cause = self._protection.describe(error, self.kind)
        events, self._events = self._events, None
        if events is None:
            self._lose(cause)
        else:
            self.leave(events.lost(cause))  # the owner reports the reason to the peer, over this lane

    def _lose(self, cause: str) -> None:
        """Report the end of the channel to the owner, once."""
        if not self._is_open:
            return
        self._broken = self._broken or cause
        events, self._events = self._events, None
        if events is None:  # closing, or not started: then ``start`` reports it
            self._shut(PeerLost(cause, cause=cause))
        else:
            self._shut(None)
            self._queue.fail(events.lost(self._broken))
        self._transport.abort()

    def _shut(self, error: PeerLost | None) -> None:
        """Release everything but the pending sends; with an ``error``, end those with it."""
        self._is_open = False
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._stop_timer()
        self._stop_watching()
        self._socket.close()
        for future in (self._flushed, self._gone):
            if future is not None and not future.done():
                future.set_result(None)
        if error is not None:
            self._queue.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_watching(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._loop.remove_writer(self._descriptor)


def _first_segments(
    head: bytes, payload: Payload, checksum: PayloadChecksum | None
) -> list[bytes | bytearray | memoryview]:
    """Return the segments of the first system call: all of a frame, unless it is large or in very many pieces."""
    first = payload if len(payload) <= WRITE_BYTES else payload[:WRITE_BYTES]
    views = views_of(first)[:MAX_SEGMENTS]
    if checksum is None:
        return [head, *views]
    count = sum(map(len, views))
    checksum.cover(payload, count)
    return [head, *views, checksum.tail()] if count == len(payload) else [head, *views]


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return os_reason(error)
    return str(error) or type(error).__name__


class WriteCoalescer:
    """Gathers the messages of a turn and passes them to ``send`` as bytes to which no other reference exists.

    Theory of operation.  A system call costs more than everything else done for a small message, and actors often send
    many of them in one turn of the event loop.  The first message of a turn is sent at once, so that a single one is
    not delayed; the others are gathered and sent at the end of the turn, or as soon as there are enough of them.
    """

    def __init__(self, send: Callable[[bytearray], None]) -> None:
        self.waiting = bytearray()
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._is_within = False

    def add(self, head: bytes, payload: Payload, checksum: PayloadChecksum | None = None) -> bool:
        """Gather a copy of a message; return False if it is the turn's first, or large, and must be sent by itself."""
        if not self._is_within:
            self._is_within = True
            self._loop.call_soon(self._end_turn)
            return False
        if len(payload) > GATHERED_BYTES:
            return False
        self.waiting += head
        for view in views_of(payload):
            self.waiting += view
        if checksum is not None:
            checksum.cover(payload, len(payload))
            self.waiting += checksum.tail()
        if len(self.waiting) > GATHERED_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Send the gathered messages."""
        if self.waiting:
            gathered, self.waiting = self.waiting, bytearray()
            self._send(gathered)

    def _end_turn(self) -> None:
        self._is_within = False
        self.flush()
