"""Cut a stream of bytes into lines: pure, bounded, whatever the bytes are."""

from __future__ import annotations


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
