"""Write to our own stdout and stderr without ever blocking the event loop.

A thread per stream does the writing, one job at a time, in order.  The caller awaits the end of its job, so a slow
reader holds the producers back, and memory stays bounded.  The threads are daemons: a reader that stopped reading
cannot keep the launcher from ending.
"""

from __future__ import annotations

import os
import select

from asyncpar.core.concurrency.worker import DaemonThread


class OutputStream(DaemonThread):
    """A descriptor with a thread that writes to it."""

    def __init__(self, descriptor: int, *, name: str) -> None:
        super().__init__(f"asyncpar-{name}")
        self._descriptor = descriptor

    async def write(self, chunk: bytes) -> None:
        """Return once ``chunk`` is in the kernel's hands.  Raises ``BrokenPipeError`` when the reader has gone."""
        await self.run(lambda: write_all(self._descriptor, chunk))


def write_all(descriptor: int, chunk: bytes) -> None:
    """Write all of ``chunk``, waiting for room; also if the descriptor is non-blocking."""
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class LineSplitter:
    """Feed chunks, get whole lines without their ends.

    Line feed, carriage return and both end a line (progress bars write the return alone).  A line of more than
    ``limit`` bytes is passed on in pieces, so at most ``limit`` bytes wait.
    """

    def __init__(self, *, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._partial = b""
        self._ended_by_return = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that ``chunk`` completes."""
        if not chunk:
            return []
        if self._ended_by_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._ended_by_return = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > self._limit or any(len(line) > self._limit for line in lines):
            return self._cut(lines)
        return lines

    def finish(self) -> list[bytes]:
        """Return what is left at the end of the stream."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        limit = self._limit
        pieces = [line[start : start + limit] for line in lines for start in range(0, len(line) or 1, limit)]
        while len(self._partial) > limit:
            pieces.append(self._partial[:limit])
            self._partial = self._partial[limit:]
        return pieces
