"""The output of one rank: stdout, stderr and the report channel, shown and written to log files.

Log files are ``LOG_DIR/attempt_N/RANK/{stdout,stderr}.log``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

import msgspec

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.rank_reports import (
    BeatRecord,
    BlockedRecord,
    FailureReport,
    PhaseRecord,
    ProgressRecord,
    WaitRecord,
    parse_record,
)
from asyncpar.core.private_files import make_private_folder, open_private
from asyncpar.core.system_errors import os_reason
from asyncpar.launch.display import Display, LineSplitter, write_all
from asyncpar.launch.options import StreamChoice, Streams
from asyncpar.launch.post_mortem import TailFile
from asyncpar.launch.tracebacks import HOLD_SECONDS, REPORTED_HOLD_SECONDS, TracebackHold
from asyncpar.launch.vitals import Vitals
from asyncpar.launch.wait_board import WaitReport
from asyncpar.observe.summary import pack


class RankLogs:
    """Opens log files in ``directory``: both streams of all ranks are kept there, whether or not they are shown, too.

    Streams in ``redirects`` that are not in ``tee`` go there only.
    """

    def __init__(self, directory: Path | None, *, redirects: StreamChoice, tee: StreamChoice) -> None:
        self._directory = directory
        self._redirects = redirects
        self._tee = tee

    def is_shown(self, stream: Streams, *, local_rank: int) -> bool:
        """Return whether ``stream`` of that rank goes to our own output."""
        return stream not in self._redirects.of(local_rank) or stream in self._tee.of(local_rank)

    def open(self, stream: Streams, *, attempt: int, rank: int) -> FileIO | None:
        """Return the new, unbuffered file for ``stream`` of that rank, None without a folder.  Raises ``OSError``."""
        if self._directory is None:
            return None
        directory = self._directory / f"attempt_{attempt}" / str(rank)
        make_private_folder(directory, under=self._directory)
        name = "stdout.log" if stream == Streams.STDOUT else "stderr.log"
        return FileIO(directory / name, "w", opener=open_private)


CHUNK_BYTES = 1 << 16

Taker = Callable[[bytes], Awaitable[None]]


class Relay:
    """Reads one pipe to its end and awaits ``take`` for each chunk, so at most a few chunks are buffered.

    ``take`` is called with ``b""`` once, at the end.
    """

    def __init__(self, descriptor: int, take: Taker) -> None:
        """Take ownership of ``descriptor``."""
        self._descriptor = descriptor
        self._take = take
        self._transport: asyncio.ReadTransport | None = None
        self._is_reading = False
        self._is_closed = False

    @property
    def is_starved(self) -> bool:
        """Whether it waits for the rank, not for ``take``."""
        return self._is_reading

    async def run(self) -> None:
        """Relay until the pipe ends or ``close`` is called."""
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK_BYTES)
        pipe = os.fdopen(self._descriptor, "rb", buffering=0)
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while chunk := await self._read(reader):
                await self._take(chunk)
            await self._take(b"")
        finally:
            self._transport.close()

    def close(self) -> None:
        """End as if the pipe ended now: a process outside the job may hold its other end."""
        if self._transport is None and not self._is_closed:
            os.close(self._descriptor)
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        self._is_reading = True
        try:
            return await reader.read(CHUNK_BYTES)
        finally:
            self._is_reading = False


_TAIL_BYTES = 32_768
_LONGEST_RECORD = 1 << 18
_SETTLE_PATIENCE = 0.5
_DRAIN_PATIENCE = 0.5


RECENT_BYTES = 1 << 16
TAIL_BYTES = 4096


class OutputTail(msgspec.Struct, frozen=True, array_like=True):
    """The last bytes, at most ``TAIL_BYTES``, of the ``end`` bytes that process ``pid`` has printed so far."""

    pid: int
    end: int
    content: bytes


class RecentOutput:
    """The last ``RECENT_BYTES`` that a rank has printed on both streams, in order of arrival."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._end = 0

    def write(self, chunk: bytes) -> None:
        """Add ``chunk``."""
        self._end += len(chunk)
        self._content += chunk[-RECENT_BYTES:]
        if len(self._content) > 2 * RECENT_BYTES:  # moved once for many chunks
            del self._content[:-RECENT_BYTES]

    def read(self) -> bytes:
        """Return the content, from the beginning of a line on."""
        content = bytes(self._content[-RECENT_BYTES:])
        return content if len(content) < RECENT_BYTES else content.partition(b"\n")[2]

    def tail(self, pid: int) -> bytes:
        """Return the packed ``OutputTail`` of this process."""
        return pack(OutputTail(pid, self._end, bytes(self._content[-TAIL_BYTES:])))


class RankOutput:
    """Relays a rank's three streams.  ``failure`` and ``stderr_tail`` describe its end, ``vitals`` its condition."""

    def __init__(
        self,
        place: LaunchEnvironment,
        descriptors: Sequence[int],
        files: Mapping[Streams, FileIO],
        *,
        display: Display,
        logs: RankLogs,
        on_broken: Callable[[str], None],
        on_phase: Callable[[], None],
        on_report: Callable[[WaitReport], None] = lambda _: None,
        holds_tracebacks: bool = False,
        tails: Mapping[Streams, TailFile] | None = None,
        on_output: Callable[[int, Streams, bytes], None] | None = None,
    ) -> None:
        """``descriptors``: the read ends for stdout, stderr and reports; they and the files are owned from now on.

        With ``holds_tracebacks`` a traceback at the end of its stderr waits for ``end``.
        """
        self.failure: FailureReport | None = None
        self.vitals = Vitals()
        self._place = place
        self._files = files
        self._tails = tails or {}
        self._display = display
        self._logs = logs
        self._on_broken = on_broken
        self._on_phase = on_phase
        self._on_report = on_report
        self._waits = WaitReport(place.generation, place.rank)
        self._on_output = on_output
        self._prefix = f"[{place.host}:{place.rank}] "
        self._tail = b""
        self.recent = RecentOutput()
        self._records = LineSplitter(limit=_LONGEST_RECORD)
        self._splitters = {Streams.STDOUT: LineSplitter(), Streams.STDERR: LineSplitter()}
        self._is_over = {Streams.STDERR: asyncio.Event(), Streams.NONE: asyncio.Event()}
        self._is_abandoned = False
        self._hold = TracebackHold() if holds_tracebacks else None
        self._releasing: asyncio.Task[None] | None = None
        stdout, stderr, reports = descriptors
        self._relays = (
            Relay(stdout, lambda chunk: self._take(Streams.STDOUT, chunk)),
            Relay(stderr, lambda chunk: self._take(Streams.STDERR, chunk)),
            Relay(reports, self._take_reports),
        )

    @property
    def stderr_tail(self) -> str:
        """The end of the rank's stderr."""
        return self._tail.decode(errors="replace")

    @property
    def stderr_file(self) -> str:
        """The path of the file with its stderr, "" if there is none."""
        file = self._files.get(Streams.STDERR)
        return "" if file is None else str(file.name)

    def has_shown(self, traceback: str) -> bool:
        """Return whether ``traceback`` was shown with the rank's output, because the rank took long to end."""
        return self._hold is not None and self._hold.has_shown(traceback)

    async def run(self) -> None:
        """Relay until all three pipes have ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for relay in self._relays:
                    tasks.create_task(relay.run())
        finally:
            for file in self._files.values():
                file.close()
            for tail in self._tails.values():
                tail.close()

    async def settle(self) -> None:
        """Wait a moment until the rank's last messages about its end have arrived."""
        try:
            async with asyncio.timeout(_SETTLE_PATIENCE):
                for over in self._is_over.values():
                    await over.wait()
        except TimeoutError:  # another process holds the pipe, or our own stderr is read slowly
            return

    async def end(self, *, has_failed: bool) -> None:
        """Show the held lines, except the traceback of a failed rank, which is in the summary of the job."""
        if self._hold is None:
            return
        hold, self._hold = self._hold, None
        if self._releasing is not None:
            self._releasing.cancel()
        await self._show_lines(hold.end(has_failed=has_failed))

    async def drain(self, relaying: asyncio.Task[None]) -> None:
        """Return when everything has been passed on; pipes that stay open and silent are closed."""
        while not relaying.done():
            await asyncio.wait({relaying}, timeout=_DRAIN_PATIENCE)
            for relay in self._relays:
                if relay.is_starved:
                    relay.close()
            if self._is_abandoned:
                relaying.cancel()
                await asyncio.wait({relaying})

    def abandon(self) -> None:
        """Stop passing on output."""
        self._is_abandoned = True

    async def _take(self, stream: Streams, chunk: bytes) -> None:
        if stream == Streams.STDERR:
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            if not chunk:
                self._is_over[stream].set()
        if stream in self._tails:
            self._tails[stream].write(chunk)
        self.recent.write(chunk)
        if self._on_output is not None:
            self._on_output(self._place.rank, stream, chunk)
        if self._is_abandoned:
            return
        try:
            if stream in self._files:
                write_all(self._files[stream].fileno(), chunk)
            if self._logs.is_shown(stream, local_rank=self._place.local_rank):
                await self._show(stream, chunk)
        except BrokenPipeError:
            self._give_up("")
        except OSError as error:
            self._give_up(f"output of rank {self._place.rank} cannot be written: {os_reason(error)}")

    async def _show(self, stream: Streams, chunk: bytes) -> None:
        if stream == Streams.STDOUT and self._place.rank == 0:
            await self._display.raw(chunk)
            return
        splitter = self._splitters[stream]
        lines = splitter.feed(chunk) if chunk else splitter.finish()
        if self._hold is not None and stream == Streams.STDERR:
            lines = self._hold.take(lines)
            if self._hold.is_holding and self._releasing is None:
                self._releasing = asyncio.create_task(self._release())
        await self._show_lines(lines)

    async def _release(self) -> None:
        """Show a traceback whose process goes on; one that the rank has reported as its end is held longer."""
        await asyncio.sleep(HOLD_SECONDS)
        if self.failure is not None:
            await asyncio.sleep(REPORTED_HOLD_SECONDS - HOLD_SECONDS)
        self._releasing = None
        if self._hold is not None and not self._is_abandoned:
            try:
                await self._show_lines(self._hold.release())
            except OSError:
                self._give_up("")

    async def _show_lines(self, lines: list[bytes]) -> None:
        if lines:
            prefix = self._prefix.encode()
            await self._display.lines(b"".join(prefix + line + b"\n" for line in lines), is_output=True)

    def relocate(self, place: str) -> None:
        """Replace the reported place of a rank that does not answer by ``place``, which was read from outside later."""
        if self._waits.blocked:
            self._report_waits(replace(self._waits, blocked=place))

    def _report_waits(self, waits: WaitReport) -> None:
        if waits != self._waits:
            self._waits = waits
            self._on_report(waits)

    def _give_up(self, reason: str) -> None:
        """Keep reading, so that the rank is not blocked, but pass nothing on."""
        self._is_abandoned = True
        self._on_broken(reason)

    async def _take_reports(self, chunk: bytes) -> None:
        if not chunk:
            self._is_over[Streams.NONE].set()
        for line in self._records.feed(chunk):
            match parse_record(line):
                case ProgressRecord() as record:
                    self._display.progress(self._place.rank, self._prefix, record)
                case PhaseRecord(phase):
                    self.vitals.enter(phase)
                    self._on_phase()
                case BeatRecord():
                    self.vitals.beat()
                case WaitRecord(notice, has_failed):
                    self._report_waits(replace(self._waits, notice=notice, has_failed=has_failed))
                case BlockedRecord(where):
                    self._report_waits(replace(self._waits, blocked=where))
                case FailureReport() as record if self.failure is None:
                    self.failure = record
