"""Waking a rank: one pipe per rank, into which its peers write small messages.

Theory of operation.  Whoever has made progress that a peer may be waiting for stores it in its own segment and then,
if that peer sleeps (or always, where memory is not polled), writes a message into the peer's pipe.  A message is 24
bytes, far below PIPE_BUF, so the kernel never mixes or tears messages, and the reader, who reads multiples of 24, gets
whole ones in the order in which each sender wrote.

Memory order.  Writing to and reading from a pipe take the same lock of the kernel (``pipe->mutex``): releasing it after
the write and acquiring it for the read order everything the writer stored before its write before everything the
reader loads after its read, on every processor.  So what was stored before ``ring`` is visible to whoever has read the
message.  Without the message there is no such order except on x86, whose stores become visible in program order and
whose loads are not reordered (TSO; Intel SDM 3A, 10.2): only there may progress words be polled.

A full pipe.  With polling, a message only says "look again": a pipe that is full makes the reader wake and look anyway,
so the message may be dropped.  Without polling the message *is* the progress, so it is kept, in order, until the pipe
is writable.  Neither blocks.  A message that announces a departure may be dropped too; whoever reads as much as
``FULL_BATCH`` messages at once therefore must look who has left.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import Callable

Message = tuple[int, int, int]
"""Who rings (world rank), for which group, and the progress word."""

LEAVING = 2**64 - 1
"""Stands for the group in the message of a rank that leaves."""

FULL_BATCH = 128
"""Fewer messages than this at once mean that the pipe was not full: the smallest pipe, one page, holds 170."""

_MESSAGE = struct.Struct("<QQQ")
_READ_BYTES = 2730 * _MESSAGE.size
"""More than a pipe of the default size, 64 KiB of pages that hold 170 messages each, can contain."""


class Doorbell:
    """One's own pipe.  ``write_end`` is what peers get; it stays open here, so that reading never meets the end."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self) -> list[Message]:
        """Return the messages that are there, oldest first; none when there are none."""
        try:
            return list(_MESSAGE.iter_unpack(os.read(self.read_end, _READ_BYTES)))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Let go of the pipe.  Idempotent."""
        for descriptor in (self.read_end, self.write_end):
            if descriptor >= 0:
                os.close(descriptor)
        self.read_end = self.write_end = -1


class Bell:
    """The way to ring one peer; takes over ``descriptor``, the write end of its pipe.

    ``keeps`` makes it keep, in order, what the pipe has no room for.  ``on_broken`` is called once, inside ``ring`` or
    later, when nobody will ever read the pipe.
    """

    def __init__(self, descriptor: int, *, keeps: bool, on_broken: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._keeps = keeps
        self._on_broken = on_broken
        self._waiting: deque[bytes] = deque()

    def ring(self, rank: int, group: int, word: int) -> None:
        """Send a message; never blocks."""
        message = _MESSAGE.pack(rank, group, word)
        if self._waiting:
            self._waiting.append(message)
        elif not self._write(message) and self._keeps and self._descriptor >= 0:
            self._waiting.append(message)
            self._loop.add_writer(self._descriptor, self._continue)

    def ring_last(self, rank: int) -> None:
        """Say that ``rank`` leaves, after as much of what waits as the pipe takes; then ``close``.

        If it does not take the farewell either it is full, so the reader gets a full batch and looks who has left.
        """
        self._continue()
        self._write(_MESSAGE.pack(rank, LEAVING, 0))
        self.close()

    def close(self) -> None:
        """Forget what waits and let go of the pipe.  Idempotent."""
        if self._waiting:
            self._waiting.clear()
            self._loop.remove_writer(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, message: bytes) -> bool:
        """Return whether the pipe took the message."""
        if self._descriptor < 0:
            return False
        try:
            os.write(self._descriptor, message)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self.close()
            self._on_broken()
            return False
        return True

    def _continue(self) -> None:
        """The pipe is writable."""
        while self._waiting and self._write(self._waiting[0]):
            self._waiting.popleft()
            if not self._waiting:
                self._loop.remove_writer(self._descriptor)
