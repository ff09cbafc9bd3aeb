"""All that comes out of one rank: stdout, stderr and the report channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from io import FileIO

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.launch.display import Display
from asyncpar.launch.lines import LineSplitter
from asyncpar.launch.options import Streams
from asyncpar.launch.output import write_all
from asyncpar.launch.rank_logs import RankLogs
from asyncpar.launch.relay import Relay
from asyncpar.launch.report_lines import BeatRecord, FailureRecord, PhaseRecord, ProgressRecord, parse_record
from asyncpar.launch.vitals import Vitals

_TAIL_BYTES = 4096
_TAIL_LINES = 20
_LONGEST_RECORD = 1 << 18
_SETTLE_PATIENCE = 0.5
_DRAIN_PATIENCE = 0.5


class RankOutput:
    """Three relays.  ``failure`` and ``stderr_tail`` are what is known of the rank's end, ``vitals`` of its life."""

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
    ) -> None:
        """``descriptors``: the read ends for stdout, stderr and reports; they and ``files`` are owned from now on."""
        self.failure: FailureRecord | None = None
        self.vitals = Vitals()
        self._place = place
        self._files = files
        self._display = display
        self._logs = logs
        self._on_broken = on_broken
        self._on_phase = on_phase
        self._prefix = f"[{place.host}:{place.rank}] "
        self._tail = b""
        self._records = LineSplitter(limit=_LONGEST_RECORD)
        self._splitters = {Streams.STDOUT: LineSplitter(), Streams.STDERR: LineSplitter()}
        self._is_over = {Streams.STDERR: asyncio.Event(), Streams.NONE: asyncio.Event()}
        self._is_abandoned = False
        stdout, stderr, reports = descriptors
        self._relays = (
            Relay(stdout, lambda chunk: self._take(Streams.STDOUT, chunk)),
            Relay(stderr, lambda chunk: self._take(Streams.STDERR, chunk)),
            Relay(reports, self._take_reports),
        )

    @property
    def stderr_tail(self) -> str:
        """The end of what the rank wrote to stderr, by whole lines as far as possible."""
        lines = self._tail.decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    async def run(self) -> None:
        """Relay until all three pipes have ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for relay in self._relays:
                    tasks.create_task(relay.run())
        finally:
            for file in self._files.values():
                file.close()

    async def settle(self) -> None:
        """Wait a moment until all that the rank wrote about its end has arrived."""
        try:
            async with asyncio.timeout(_SETTLE_PATIENCE):
                for over in self._is_over.values():
                    await over.wait()
        except TimeoutError:  # somebody else holds the pipe, or our own stderr is read slowly
            return

    async def drain(self, relaying: asyncio.Task[None]) -> None:
        """Return when everything is passed on; pipes that stay open and silent are closed."""
        while not relaying.done():
            await asyncio.wait({relaying}, timeout=_DRAIN_PATIENCE)
            for relay in self._relays:
                if relay.is_starved:
                    relay.close()
            if self._is_abandoned:
                relaying.cancel()
                await asyncio.wait({relaying})

    def abandon(self) -> None:
        """Pass on nothing more."""
        self._is_abandoned = True

    async def _take(self, stream: Streams, chunk: bytes) -> None:
        if stream == Streams.STDERR:
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            if not chunk:
                self._is_over[stream].set()
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
            self._give_up(f"output of rank {self._place.rank} cannot be written: {error.strerror}")

    async def _show(self, stream: Streams, chunk: bytes) -> None:
        if stream == Streams.STDOUT and self._place.rank == 0:
            await self._display.raw(chunk)
            return
        splitter = self._splitters[stream]
        lines = splitter.feed(chunk) if chunk else splitter.finish()
        if lines:
            prefix = self._prefix.encode()
            await self._display.lines(b"".join(prefix + line + b"\n" for line in lines))

    def _give_up(self, reason: str) -> None:
        """Keep reading, so that the rank can end, but pass nothing on."""
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
                case FailureRecord() as record if self.failure is None:
                    self.failure = record
