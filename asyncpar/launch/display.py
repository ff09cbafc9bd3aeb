"""The display: output of ranks, and the progress of the lowest rank that reports any.

It never blocks the event loop: a thread per stream does the writing, one job at a time, in order.  The caller awaits
the end of its job, so a slow reader slows the producers down, and memory stays bounded.  The threads are daemons: a
reader that stopped reading cannot keep the launcher from ending.

Two displays with one interface: plain lines, for pipes and files, and a bar at the bottom of a terminal.  A display
coalesces: when progress comes faster than it is shown, only the latest is shown, and always the last one.
"""

from __future__ import annotations

import asyncio
import os
import select
from abc import ABC, abstractmethod

from asyncpar.core.concurrency.worker import DaemonThread
from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.harmless import HarmlessStream, harmless_bytes, harmless_line, harmless_values
from asyncpar.observe.progress_line import chosen_width, drawn_line, plain_line

_BAR_SECONDS = 0.1
"""Least seconds between two drawings of the bar."""


class OutputStream(DaemonThread):
    """A descriptor with a thread that writes to it."""

    def __init__(self, descriptor: int, *, name: str) -> None:
        super().__init__(f"asyncpar-{name}")
        self._descriptor = descriptor

    async def write(self, chunk: bytes) -> None:
        """Return once the kernel has ``chunk``.  Raises ``BrokenPipeError`` when the reader has gone."""
        await self.run(lambda: write_all(self._descriptor, chunk))


def write_all(descriptor: int, chunk: bytes) -> None:
    """Write all of ``chunk``, waiting for room even if the descriptor is non-blocking."""
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class LineSplitter:
    """Splits chunks into whole lines without their line ends.

    Line feed, carriage return and both end a line (progress bars write the return alone).  A line of more than
    ``limit`` bytes is passed on in pieces, so at most ``limit`` bytes are buffered.
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
        """Return the rest at the end of the stream."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        limit = self._limit
        pieces = [line[start : start + limit] for line in lines for start in range(0, len(line) or 1, limit)]
        while len(self._partial) > limit:
            pieces.append(self._partial[:limit])
            self._partial = self._partial[limit:]
        return pieces


_LINE_PATIENCE = 0.2
"""Seconds that text for stderr waits for the end of a line on stdout, when both go to the same place."""


_ERASE_LINE = b"\r\x1b[2K"


class Display(ABC):
    """The base of both displays; owns the latest progress, not the streams."""

    def __init__(self, *, every: float) -> None:
        self._every = every
        self._latest: tuple[str, ProgressRecord] | None = None
        self._rank: int | None = None
        self._news = asyncio.Event()

    def progress(self, rank: int, prefix: str, record: ProgressRecord) -> None:
        """Show ``record`` soon; it is ignored if a lower rank reports, too."""
        if self._rank is None or rank <= self._rank:
            self._rank, self._latest = rank, (harmless_line(prefix), harmless_values(record))
            self._news.set()

    async def run(self) -> None:
        """Show progress as it comes, at most once per interval, until cancelled."""
        while True:
            await self._news.wait()
            await self._show_news()
            await asyncio.sleep(self._every)

    async def finish(self) -> None:
        """Show the last progress, and forget it."""
        await self._show_news()
        self._rank = self._latest = None

    @abstractmethod
    async def lines(self, text: bytes, *, is_output: bool = False) -> None:
        """Show whole lines (each with its end) on stderr; output of ranks (``is_output``) keeps its colours."""

    @abstractmethod
    async def raw(self, chunk: bytes) -> None:
        """Pass on a chunk of the job's own stdout; ``b""`` at its end."""

    @abstractmethod
    async def show(self, prefix: str, record: ProgressRecord) -> None:
        """Show one progress record."""

    async def _show_news(self) -> None:
        if self._news.is_set() and self._latest is not None:
            self._news.clear()
            await self.show(*self._latest)


class PlainDisplay(Display):
    """A display for a stderr that is no terminal: at most a line of progress per second.

    When both streams go to one place (``is_stdout_shared``: ``2>&1``), text for stderr waits a moment until the job's
    stdout has ended its line: a program may write a line in pieces.
    """

    def __init__(
        self,
        stdout: OutputStream,
        stderr: OutputStream,
        *,
        is_stdout_shared: bool = False,
        stdout_filter: HarmlessStream | None = None,
        every: float = 1.0,
    ) -> None:
        """``stdout_filter`` is for a stdout that is a terminal; a pipe or a file gets every byte unchanged."""
        super().__init__(every=every)
        self._filter = stdout_filter
        self._stdout = stdout
        self._stderr = stderr
        self._is_stdout_shared = is_stdout_shared
        self._line_has_ended = asyncio.Event()
        self._line_has_ended.set()

    async def lines(self, text: bytes, *, is_output: bool = False) -> None:  # noqa: ARG002  # no terminal, no colours
        try:
            async with asyncio.timeout(_LINE_PATIENCE):
                await self._line_has_ended.wait()
        except TimeoutError:
            self._line_has_ended.set()  # a prompt or a row of dots: wait no second time
        await self._stderr.write(harmless_bytes(text))

    async def raw(self, chunk: bytes) -> None:
        ends_line = not chunk or chunk.endswith(b"\n")
        if self._is_stdout_shared and not ends_line:
            self._line_has_ended.clear()
        shown = chunk if self._filter is None else self._filter.feed(chunk)
        if shown:
            await self._stdout.write(shown)
        if ends_line:
            self._line_has_ended.set()

    async def show(self, prefix: str, record: ProgressRecord) -> None:
        width = chosen_width()
        line = plain_line(record, width=None if width is None else width - len(prefix))
        await self.lines(f"{prefix}{line}\n".encode())


class TerminalDisplay(Display):
    """A display for a stderr that is a terminal: the bar is its last line, erased and redrawn around other output.

    When stdout is a terminal too (``is_stdout_shared``), the job's stdout is shown by whole lines, above the bar.
    """

    def __init__(
        self,
        stdout: OutputStream,
        stderr: OutputStream,
        *,
        descriptor: int,
        is_stdout_shared: bool,
    ) -> None:
        super().__init__(every=_BAR_SECONDS)
        self._stdout = stdout
        self._stderr = stderr
        self._descriptor = descriptor
        self._is_stdout_shared = is_stdout_shared
        self._splitter = LineSplitter()
        self._bar: ProgressRecord | None = None

    async def lines(self, text: bytes, *, is_output: bool = False) -> None:
        shown = harmless_bytes(text, colors=is_output)
        await self._stderr.run(lambda: self._draw(shown))

    async def raw(self, chunk: bytes) -> None:
        if not self._is_stdout_shared:
            if chunk:
                await self._stdout.write(chunk)
            return
        lines = self._splitter.feed(chunk) if chunk else self._splitter.finish()
        if lines:
            await self.lines(b"".join(line + b"\n" for line in lines), is_output=True)

    async def show(self, prefix: str, record: ProgressRecord) -> None:  # noqa: ARG002  # there is one bar only
        self._bar = record
        await self._stderr.run(lambda: self._draw(b""))

    async def finish(self) -> None:
        await super().finish()
        if self._bar is not None:
            self._bar = None
            await self._stderr.write(b"\n")

    def _draw(self, text: bytes) -> None:
        """Write ``text`` above the bar.  Runs in the writing thread."""
        bar = b"" if self._bar is None else drawn_line(self._bar, width=self._width() - 1).encode()
        erase = _ERASE_LINE if self._bar is not None else b""
        write_all(self._descriptor, erase + text + bar)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._descriptor).columns or 80
        except OSError:
            return 80


def make_display(stdout: OutputStream, stderr: OutputStream) -> Display:
    """Return the display that suits our own standard streams."""
    has_colors = os.environ.get("TERM", "") != "dumb"
    if os.isatty(2) and has_colors:
        return TerminalDisplay(stdout, stderr, descriptor=2, is_stdout_shared=os.isatty(1))
    stdout_filter = HarmlessStream(colors=has_colors) if os.isatty(1) else None
    return PlainDisplay(stdout, stderr, is_stdout_shared=_is_one_place(1, 2), stdout_filter=stdout_filter)


def _is_one_place(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:  # closed
        return False
