"""The last lines of output of the ranks, for the page."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

MOST_LINES: Final = 1000
LONGEST_LINE: Final = 400


class LogTail:
    """The last lines of output, numbered from 1."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=MOST_LINES)
        self._number = 0
        self._partial: dict[tuple[int, bool], bytes] = {}

    def add(self, text: bytes, *, rank: int | None, error: bool = False) -> None:
        """Add a line, given without its end."""
        self._number += 1
        shown = text[:LONGEST_LINE].decode("utf-8", "replace")
        self._lines.append({"n": self._number, "rank": rank, "text": shown, "error": error})

    def feed(self, chunk: bytes, *, rank: int, error: bool = False) -> None:
        """Add output as it comes, in pieces of lines; ``b""`` marks its end."""
        key = rank, error
        *lines, rest = (self._partial.pop(key, b"") + chunk).split(b"\n")
        for line in lines[-MOST_LINES:]:
            self.add(line.rstrip(b"\r").rpartition(b"\r")[2], rank=rank, error=error)
        if rest and not chunk:
            self.add(rest, rank=rank, error=error)
        elif rest:
            self._partial[key] = rest[-LONGEST_LINE * 4 :]

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the lines with greater numbers."""
        return [line for line in self._lines if line["n"] > number]
