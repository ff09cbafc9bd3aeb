"""What people see: output of ranks, and the progress of the lowest rank that reports any.

Two displays with one interface: plain lines, for pipes and files, and a bar at the bottom of a terminal.  A display
coalesces: of progress that comes faster than it shows, the latest counts, and the last one is always shown.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod

from asyncpar.launch.lines import LineSplitter
from asyncpar.launch.output import OutputStream, write_all
from asyncpar.launch.progress_line import drawn_line, plain_line
from asyncpar.launch.report_lines import ProgressRecord

_ERASE_LINE = b"\r\x1b[2K"


class Display(ABC):
    """The base of both; owns the latest progress, not the streams."""

    def __init__(self, *, every: float) -> None:
        self._every = every
        self._latest: tuple[str, ProgressRecord] | None = None
        self._rank: int | None = None
        self._news = asyncio.Event()

    def progress(self, rank: int, prefix: str, record: ProgressRecord) -> None:
        """Have ``record`` shown soon; ignored when a lower rank reports too."""
        if self._rank is None or rank <= self._rank:
            self._rank, self._latest = rank, (prefix, record)
            self._news.set()

    async def run(self) -> None:
        """Show progress as it comes, at most once per interval, until cancelled."""
        while True:
            await self._news.wait()
            await self._show_news()
            await asyncio.sleep(self._every)

    async def finish(self) -> None:
        """Show what is still to be shown, and begin anew."""
        await self._show_news()
        self._rank = self._latest = None

    @abstractmethod
    async def lines(self, text: bytes) -> None:
        """Show whole lines (each with its end) on stderr."""

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
    """For a stderr that is no terminal: a line per second."""

    def __init__(self, stdout: OutputStream, stderr: OutputStream, *, every: float = 1.0) -> None:
        super().__init__(every=every)
        self._stdout = stdout
        self._stderr = stderr

    async def lines(self, text: bytes) -> None:
        await self._stderr.write(text)

    async def raw(self, chunk: bytes) -> None:
        if chunk:
            await self._stdout.write(chunk)

    async def show(self, prefix: str, record: ProgressRecord) -> None:
        await self._stderr.write(f"{prefix}{plain_line(record)}\n".encode())


class TerminalDisplay(Display):
    """For a stderr that is a terminal: the bar is its last line, erased and drawn again around everything else.

    When stdout is a terminal too (``is_stdout_shared``), the job's stdout is shown by whole lines, above the bar.
    """

    def __init__(
        self,
        stdout: OutputStream,
        stderr: OutputStream,
        *,
        descriptor: int,
        is_stdout_shared: bool,
        every: float = 0.1,
    ) -> None:
        super().__init__(every=every)
        self._stdout = stdout
        self._stderr = stderr
        self._descriptor = descriptor
        self._is_stdout_shared = is_stdout_shared
        self._splitter = LineSplitter()
        self._bar: ProgressRecord | None = None

    async def lines(self, text: bytes) -> None:
        await self._stderr.run(lambda: self._draw(text))

    async def raw(self, chunk: bytes) -> None:
        if not self._is_stdout_shared:
            if chunk:
                await self._stdout.write(chunk)
            return
        lines = self._splitter.feed(chunk) if chunk else self._splitter.finish()
        if lines:
            await self.lines(b"".join(line + b"\n" for line in lines))

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
    """Return the display that fits our own standard streams."""
    if os.isatty(2) and os.environ.get("TERM", "") != "dumb":
        return TerminalDisplay(stdout, stderr, descriptor=2, is_stdout_shared=os.isatty(1))
    return PlainDisplay(stdout, stderr)
