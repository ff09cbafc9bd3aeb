"""Large messages through memory that both ranks of a link have mapped: two copies, and none by the kernel.

Theory of operation.  The sender owns a few chunks of memory that the receiver can read.  It copies the next bytes of a
message into a free chunk and announces that in a CHUNK frame, which holds only the place; the receiver copies them to
the message's memory and returns the chunk by a FREED frame.  So both ranks copy at the same time, out of and into their
caches, messages are as bounded as any (a receiver lends memory only for granted messages), and small frames pass in
between.  Chunks are allocated one by one, when none is free: the receiver has the first by then, and its own fresh
memory to touch.  A message is sent this way only if it was granted with the fingerprint ``READS``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from asyncpar.errors import PeerLost, ProtocolError, UsageError
from asyncpar.net.transport.lane import Sending, fail_future
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key, Payload, write_payload

LEAST_SHARED: Final = 2 << 20
"""Smaller messages are as fast over the lane."""

CHUNK_BYTES: Final = 2 << 20
"""Part of the protocol: equal on all ranks."""

CHUNKS: Final = 4

READS: Final = 1
"""Fingerprint of a GRANT by a rank that can read the message from the sender's memory."""

Emit = Callable[[FrameKind, Key, int, int], None]


class SharedMemory(ABC):
    """Memory that each rank of a host writes for itself and the others can read."""

    @abstractmethod
    def allocate(self, size: int) -> tuple[int, memoryview] | None:
        """Return ``size`` bytes of this rank's memory and their offset, the place for other ranks; None for no room.

        They are free again when the view is gone.
        """

    @abstractmethod
    def can_read(self, rank: int) -> bool:
        """Return whether the memory of ``rank`` can be read here."""

    @abstractmethod
    def read(self, rank: int, offset: int, size: int) -> memoryview:
        """Return a part of the memory of ``rank``, which must be readable.  Raises ``UsageError`` for a wrong place."""

    @abstractmethod
    def is_gone(self, rank: int) -> bool:
        """Return whether ``rank`` has left, so that bytes just read from its memory may be invalid."""


class SharedSending(Sending):
    """A message that is not yet completely copied into shared memory."""

    __slots__ = ("_is_dropped", "key", "left", "size")

    def __init__(self, key: Key, payload: Payload, done: asyncio.Future[None]) -> None:
        self.key = key
        self.left: Payload = payload
        self.size = len(payload)
        self.done = done
        self._is_dropped = False

    @property
    def waiting_bytes(self) -> int:
        return len(self.left)

    @property
    def is_dropped(self) -> bool:
        """Whether it was withdrawn before it had begun."""
        return self._is_dropped

    def release(self) -> bool:
        if len(self.left) == self.size or self._is_dropped:
            self.drop()
            self.done.cancel()
            return False
        self.left = memoryview(bytes(self.left))
        self.done.cancel()
        return True

    def drop(self) -> None:
        """Stop sending it and release the memory."""
        self._is_dropped = True
        self.left = memoryview(b"")


class Exporter:
    """The sending half, for one link."""

    def __init__(self, memory: SharedMemory, emit: Emit) -> None:
        self.bytes_sent = 0
        self._memory = memory
        self._emit = emit
        self._chunks: dict[int, memoryview] = {}
        """All chunks, by their offsets."""
        self._most = CHUNKS
        self._free: list[int] = []
        """The most recently freed one is used next: caches hold it."""
        self._unread: deque[int] = deque()
        self._waiting: deque[SharedSending] = deque()

    def is_ready(self) -> bool:
        """Return whether there is memory to share."""
        return bool(self._chunks) or self._add_chunk()

    def send(self, key: Key, payload: Payload) -> Sending | None:
        """Send a message that the peer has granted and can read; return None if ``payload`` may be reused at once.

        Call it only if ``is_ready``.
        """
        sending = SharedSending(key, payload, asyncio.get_running_loop().create_future())
        self._waiting.append(sending)
        self._advance()
        return None if sending.done.done() else sending

    def freed(self, offset: int) -> None:
        """Free the chunk at ``offset``, which the peer has read."""
        if not self._unread or self._unread.popleft() != offset:
            raise ProtocolError(f"chunk: the peer gave back one at {offset}, which it had not to read")
        self._free.append(offset)
        self._advance()

    def fail(self, error: PeerLost) -> None:
        """Stop sending: waiting messages end with ``error``.  The chunks stay: the peer may still be reading."""
        waiting, self._waiting = self._waiting, deque()
        for sending in waiting:
            sending.drop()
            fail_future(sending.done, error)

    def _advance(self) -> None:
        while self._waiting:
            sending = self._waiting[0]
            if sending.is_dropped:
                self._waiting.popleft()
                continue
            if not self._free and not self._add_chunk():
                return
            offset = self._free.pop()
            piece, sending.left = sending.left[:CHUNK_BYTES], sending.left[CHUNK_BYTES:]
            write_payload(piece, self._chunks[offset][: len(piece)])
            self._unread.append(offset)
            self.bytes_sent += len(piece)
            if not sending.left:
                self._waiting.popleft()
                if not sending.done.done():
                    sending.done.set_result(None)
            self._emit(FrameKind.CHUNK, sending.key, 0, offset)

    def _add_chunk(self) -> bool:
        """Allocate one more free chunk; return False if there are enough, or there is no memory."""
        made = self._memory.allocate(CHUNK_BYTES) if len(self._chunks) < self._most else None
        if made is None:
            self._most = len(self._chunks) or self._most
            return False
        offset, memory = made
        self._chunks[offset] = memory
        self._free.append(offset)
        return True


class Importer:
    """The receiving half, for one link to ``peer``.

    ``reserve`` returns memory for a granted message, ``complete`` delivers it.
    """

    def __init__(
        self,
        memory: SharedMemory,
        *,
        peer: int,
        emit: Emit,
        reserve: Callable[[Key], tuple[FrameHeader, memoryview]],
        complete: Callable[[FrameHeader, memoryview], None],
    ) -> None:
        self.bytes_received = 0
        self._memory = memory
        self._peer = peer
        self._emit = emit
        self._reserve = reserve
        self._complete = complete
        self._landing: tuple[FrameHeader, memoryview] | None = None
        self._position = 0
        self._is_over = False

    def can_read(self, size: int) -> bool:
        """Return whether a message of ``size`` bytes should come this way."""
        return size >= LEAST_SHARED and self._memory.can_read(self._peer)

    def chunk(self, key: Key, offset: int) -> None:
        """Read the next bytes of message ``key``, which are in the peer's memory at ``offset``."""
        if self._is_over:
            return
        if self._landing is None:
            self._landing, self._position = self._reserve(key), 0
        header, landing = self._landing
        if header.key != key:
            raise ProtocolError(f"chunk: message {header.sequence} is not complete, one of {key.sequence} came")
        size = min(CHUNK_BYTES, len(landing) - self._position)
        landing[self._position : self._position + size] = self._read(offset, size)
        if self._memory.is_gone(self._peer):  # it left before this was read: treat it as not sent
            self.fail()
            return
        self._position += size
        self.bytes_received += size
        is_complete = self._position == len(landing)
        if is_complete:
            self._landing = None
        self._emit(FrameKind.FREED, key, 0, offset)  # the next chunk may arrive inside this call
        if is_complete:
            self._complete(header, landing)

    def fail(self) -> None:
        """Drop the incomplete message, and anything that may follow."""
        self._is_over = True
        self._landing = None

    def _read(self, offset: int, size: int) -> memoryview:
        if not self._memory.can_read(self._peer):
            raise ProtocolError("chunk: the memory of the peer cannot be read here")
        try:
            return self._memory.read(self._peer, offset, size)
        except UsageError as error:
            raise ProtocolError(f"chunk: {error}") from error


class Exchange:
    """Both halves, for one link to ``peer``."""

    def __init__(
        self,
        memory: SharedMemory,
        *,
        peer: int,
        emit: Emit,
        reserve: Callable[[Key], tuple[FrameHeader, memoryview]],
        complete: Callable[[FrameHeader, memoryview], None],
    ) -> None:
        self.exporter = Exporter(memory, emit)
        self.importer = Importer(memory, peer=peer, emit=emit, reserve=reserve, complete=complete)

    def moved(self, header: FrameHeader, offset: int) -> None:
        """Handle a CHUNK or FREED frame."""
        if header.kind is FrameKind.CHUNK:
            self.importer.chunk(header.key, offset)
        else:
            self.exporter.freed(offset)

    def fail(self, error: PeerLost) -> None:
        """Handle the loss of the link."""
        self.exporter.fail(error)
        self.importer.fail()
