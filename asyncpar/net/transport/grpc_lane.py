"""The gRPC lane: one bidirectional stream of raw bytes, for networks where only HTTP/2 gets through.

Frames are packed into chunks of up to 512 KiB; frames that wait together are sent together.  Each chunk begins with two
u32: how many chunks its sender has consumed since it last reported that, and the CRC-32 of that and of the number of
preceding chunks.  A side never has more than ``WINDOW`` unconsumed chunks in transit, so the data buffered by gRPC on
the way is bounded.  A chunk that consists of this prefix alone takes no room in the window.

Where nothing else protects the bytes, each side sends such a chunk once a second, as long as it reads and its loop is
on time: the bytes of all chunks that it has not consumed although they were written long ago are lost.  A damaged
length of a message, for one, makes gRPC wait forever for its end, and swallow everything that follows.  These chunks do
not wait for the window, because the chunk that would open it again may be the one that is lost.

The side that closes announces it in a last chunk and then waits for the other side to end the stream: if a server
simply returned, a client that is writing would get an error, and gRPC would withhold data that has arrived but has not
been read.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from zlib import crc32

from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.connection import Connection, PartEvents
from asyncpar.net.transport.grpc_stream import ByteStream, StreamEnded
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, LaneEvents
from asyncpar.net.transport.positions import TICK_SECONDS, Positions
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.queue import QueuedSending, SendQueue
from asyncpar.net.wire.frame import SEALED_BYTES, TAIL_BYTES, FrameDamaged, FrameHeader, Payload, encode_header
from asyncpar.net.wire.reader import FrameReader

CHUNK_BYTES = 512 * 1024
"""Larger ones are no faster, and a payload of 1 MiB takes half the time in two chunks, which overlap."""

WINDOW = 16
"""Most chunks in transit in one direction."""

FLUSH_SECONDS = 1.0
"""Seconds for which a lane that is closed waits for a peer that takes nothing, or does not end the stream."""

_CHUNK_SECONDS = 4.0
"""Seconds by which a full chunk may take longer than an empty one: only its end is seen.  See ``positions``."""

_PREFIX = struct.Struct("<II")
_NUMBERED = struct.Struct("<IQ")
_LAST_CHUNK = 0xFFFF_FFFF
"""The count of consumed chunks that marks the last chunk of a side."""


def encode_prefix(consumed: int, number: int) -> bytes:
    """Return the prefix of chunk ``number``."""
    return _PREFIX.pack(consumed, crc32(_NUMBERED.pack(consumed, number)))


class GrpcLane(Connection):
    """A lane over a stream whose handshake is complete.  Its creator must await ``run``, which carries the frames.

    ``protection`` is that of the connection.  ``link_timeout`` is the number of seconds for which nothing may arrive of
    the bytes that the peer reports as missing; for large chunks it is a little more.
    """

    kind = "grpc"

    def __init__(self, stream: ByteStream, protection: Protection, *, link_timeout: float = LINK_SECONDS) -> None:
        self._stream = stream
        self._protection = protection
        self._sealer = protection.sealer
        self._queue = SendQueue(self._sealer)
        self._writer = self._queue.writer
        self._reader: FrameReader | None = None
        self._events: LaneEvents | None = None
        self._started = asyncio.Event()
        self._work = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end_cause = ""
        self._is_closing = False
        self._under_way: deque[int] = deque()
        """Number of bytes written up to the end of each chunk that takes room in the window."""
        self._owed = 0
        self._owes_position = False
        self._was_held = False
        """Whether the reader has been held since the last second: then a chunk may take any time."""
        self._chunks_sent = self._chunks_received = 0
        self._bytes_written = self._bytes_consumed = 0
        self._positions = Positions(patience=link_timeout, piece_bytes=CHUNK_BYTES, piece_seconds=_CHUNK_SECONDS)
        self._timer: asyncio.TimerHandle | None = None

    # -- Lane, Connection --------------------------------------------------------------------------------------------

    @property
    def missing_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.missing_bytes

    def start(self, events: LaneEvents) -> None:
        self._start(
            events,
            FrameReader(
                events,
                max_length=MAX_FRAME_BYTES,
                verifier=self._protection.verifier,
            ),
        )

    def start_part(self, part: PartEvents) -> None:
        reader = FrameReader(
            part,
            max_length=MAX_FRAME_BYTES,
            share=part.share,
            ended=part.ended,
            verifier=self._protection.verifier,
        )
        self._start(part, reader)

    def send(self, header: FrameHeader, payload: Payload) -> QueuedSending | None:
        if self._ended.done() or self._is_closing:
            return None
        head = self._sealer.seal(encode_header(header))
        checksum = self._sealer.begin_payload(head, len(payload))
        self._bytes_sent += SEALED_BYTES + len(payload) + (0 if checksum is None else TAIL_BYTES)
        sending = self._queue.push(header, head, payload, checksum=checksum)
        self._work.set()
        if self._queue.is_overfull:
            self._lose("the peer does not read: too many small frames wait for it")
        return sending

    def divert(self) -> None:
        if self._reader is not None:
            self._reader.divert()

    def hold(self) -> None:
        if self._reader is not None:
            self._reader.hold()
            self._free.clear()
            self._was_held = True

    def resume(self) -> None:
        if self._reader is None or not self._reader.is_held:
            return
        try:
            is_free = self._reader.resume()
        except ProtocolError as error:
            self._refuse(error)
        else:
            if is_free:
                self._free.set()

    def abort(self, error: PeerLost) -> None:
        if not self._ended.done():
            self._end(str(error))
            self._queue.fail(error)

    def leave(self, error: PeerLost) -> None:
        if self._ended.done() or self._is_closing:
            return
        self._queue.release_all(error)
        self._finish()
        asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.abort, error)

    async def close(self) -> None:
        if self._ended.done() or self._is_closing:
            return
        self._finish()
        try:
            await self._queue.flush(self._ended, FLUSH_SECONDS)
        except TimeoutError:
            pass  # the peer takes nothing, or does not end the stream: it had its time
        finally:
            self.abort(PeerLost("the lane was closed before this was sent", cause="closed"))

    # -- the stream's side -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry frames both ways until the lane ends, and end the stream."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reader, writer = tasks.create_task(self._read_all()), tasks.create_task(self._write_all())
                waited: set[asyncio.Future[None]] = {self._ended, reader}  # a cancelled call cancels its reader
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                reader.cancel()
                writer.cancel()
        finally:
            self._lose("the stream was cancelled")
            self._stream.cancel()

    async def _read_all(self) -> None:
        await self._started.wait()
        try:
            while not self._ended.done():
                try:
                    content = left = self._open_chunk(await self._stream.read())
                    while left and self._reader is not None:
                        await self._free.wait()
                        left = self._reader.feed(left)
                except ProtocolError as error:
                    if not self._is_closing:  # else nothing that arrives matters any more
                        self._refuse(error)
                else:
                    self._return_credit(len(content))
        except StreamEnded as error:
            is_cut = self._reader is not None and not self._reader.is_between_frames
            self._lose(f"{error} in the middle of a frame" if is_cut else str(error))

    async def _write_all(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while chunk := self._next_chunk():
                    await self._stream.write(chunk)
                if self._is_closing and not self._writer:
                    await self._stream.write(encode_prefix(_LAST_CHUNK, self._chunks_sent))
                    return
        except StreamEnded as error:
            self._lose(str(error))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, events: LaneEvents, reader: FrameReader) -> None:
        if self._ended.done():
            events.lost(self._end_cause)
            return
        self._events = events
        self._reader = reader
        self._started.set()
        if self._protection.may_damage:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _open_chunk(self, chunk: bytes) -> memoryview:
        """Process the credit in one chunk of the peer and return the rest, bytes of frames."""
        if not _PREFIX.size <= len(chunk) <= _PREFIX.size + CHUNK_BYTES:
            raise ProtocolError(
                f"chunk: expected {_PREFIX.size} to {_PREFIX.size + CHUNK_BYTES} bytes, got {len(chunk)}"
            )
        returned = _PREFIX.unpack_from(chunk)[0]
        if chunk[: _PREFIX.size] != encode_prefix(returned, self._chunks_received):
            raise FrameDamaged(f"chunk {self._chunks_received}: the checksum of its beginning is wrong")
        self._chunks_received += 1
        if returned == _LAST_CHUNK:
            raise StreamEnded("the peer closed the stream")
        if returned:
            if returned > len(self._under_way):
                raise ProtocolError(f"chunks: the peer consumed {returned - len(self._under_way)} more than were sent")
            for _ in range(returned):
                self._bytes_consumed = self._under_way.popleft()
            self._work.set()
        if len(chunk) == _PREFIX.size:
            self._positions.receive(
                asyncio.get_running_loop().time(), self._bytes_consumed, written=self._bytes_written
            )
        return memoryview(chunk)[_PREFIX.size :]

    def _return_credit(self, length: int) -> None:
        """Return credit in batches: a chunk with ``length`` bytes of frames is consumed."""
        self._bytes_received += length
        self._owed += length > 0
        if self._owed >= WINDOW // 2:
            self._work.set()

    def _next_chunk(self) -> bytes:
        """Return the next chunk: frames if there are any and the window allows, or credit; empty for nothing."""
        segments: list[memoryview] = []
        if len(self._under_way) < WINDOW:
            segments = self._writer.segments(CHUNK_BYTES)
        if not segments:
            if self._owed < WINDOW // 2 and not self._owes_position:
                return b""
            self._owes_position = False
        chunk = b"".join([encode_prefix(self._owed, self._chunks_sent), *segments])
        self._chunks_sent += 1
        self._owed = 0
        if segments:
            self._bytes_written += len(chunk) - _PREFIX.size
            self._under_way.append(self._bytes_written)
            self._writer.advance(len(chunk) - _PREFIX.size)
        return chunk

    def _finish(self) -> None:
        """Accept nothing more, flush waiting frames, and announce the end."""
        self._is_closing = True
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._free.set()
        self._started.set()
        self._work.set()

    def _tick(self) -> None:
        """Check, once a second, whether all bytes arrive."""
        if self._ended.done() or self._is_closing or self._reader is None:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK_SECONDS, self._tick)
        self._positions.mark(loop.time(), self._bytes_written)
        self._owes_position = self._positions.tick(
            loop.time(),
            sent=self._bytes_sent,
            received=self._bytes_received,
            is_in_frame=True,  # gRPC's partial chunks are invisible, so it may always be in one
            is_reading=not self._was_held,
        )
        self._was_held = self._reader.is_held
        if self._owes_position:
            self._work.set()

    def _refuse(self, error: ProtocolError) -> None:
        """Report to both ends that the received bytes are not those of a valid peer, and end."""
        cause = self._protection.describe(error, self.kind)
        events, self._events = self._events, None
        if events is None:
            self._lose(cause)
        else:
            self.leave(events.lost(cause))  # the owner reports the reason to the peer, over this lane

    def _lose(self, cause: str) -> None:
        """Report the end of the channel to the owner, once."""
        if self._ended.done():
            return
        events = self._events
        self._end(cause)
        self._queue.fail(PeerLost(cause, cause=cause) if events is None else events.lost(cause))

    def _end(self, cause: str) -> None:
        self._end_cause = cause
        if self._timer is not None:
            self._timer.cancel()
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._ended.set_result(None)
