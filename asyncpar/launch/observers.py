"""Show a running job to users: dashboard, sinks, metrics, alarms, and the file of the run for a later report.

None of them can end the job: each failure to show or to write is reported once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncpar.core.addresses import split_address
from asyncpar.dashboard.log_tail import LogTail
from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.run_file import write_run
from asyncpar.errors import UsageError
from asyncpar.launch.job_view import JobOutcome, JobWatch, ShownJob
from asyncpar.launch.options import ObserverOptions, Streams
from asyncpar.launch.output_view import OutputFollower, read_output
from asyncpar.launch.page_views import view_flight, view_pipeline
from asyncpar.observe.alarms import AlarmBoard
from asyncpar.observe.sinks import SinkThread, load_sink, names_of_sinks
from asyncpar.observe.summary import JobSummary, RankReport

if TYPE_CHECKING:  # aiohttp is installed with an extra
    from asyncpar.dashboard.server import DashboardServer

LOOK_SECONDS: Final = 1.0
WRITE_SECONDS: Final = 10.0
DRAW_SECONDS: Final = 3.0
"""Seconds between requests for the last run of a pipeline, while a browser is open."""

READ_SECONDS: Final = 5.0
"""Seconds for which other hosts are asked for output after a browser has asked for it."""


class Observers:
    """Reads the state of ``view`` once a second, and passes it on.  ``add_output`` takes the output of ranks."""

    def __init__(
        self,
        view: JobWatch,
        report: Callable[[str], None],
        directory: Path | None,
        own: Callable[[], Sequence[RankReport]] = tuple,
    ) -> None:
        """``own()`` returns the ranks of this host, whose output ``add_output`` gets."""
        self._view = view
        self._report = report
        self._directory = directory
        self.is_active = True
        self.tail = LogTail()
        self._follower = OutputFollower(view, self.tail, own)
        self._painter, self._painted = Painter(), ("", 0.0)
        self._job: JobSummary | None = None
        self._schedule: dict[str, Any] | None = None
        """The last run of the job's pipeline."""
        self._drawn_at = 0.0
        self._pulled_at = 0.0
        self._alarms = AlarmBoard()
        self.sinks: list[SinkThread] = []
        self.dashboard: DashboardServer | None = None
        self._is_written = directory is not None
        self._written_at = 0.0
        self._reasons: set[str] = set()
        """The reasons of failures to read the state."""

    def add_output(self, rank: int, stream: Streams, chunk: bytes) -> None:
        """Take output of a rank; ``b""`` at its end."""
        self.tail.feed(chunk, rank=rank, error=stream is Streams.STDERR)

    async def run(self) -> None:
        """Read the state until cancelled."""
        if self.is_active:
            await asyncio.gather(self._repeat(self.look), self._repeat(self.pull))

    async def _repeat(self, look: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._try(look)
            due = max(due + LOOK_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _try(self, look: Callable[[], Awaitable[None]]) -> None:
        """Read the state once; each reason of a failure is reported once, and ends nothing."""
        own = asyncio.current_task()
        assert own is not None
        try:
            await look()
        except (Exception, asyncio.CancelledError) as error:  # a call whose channel fails may end as cancelled
            if own.cancelling():
                raise
            reason = f"{type(error).__name__}: {error}"
            if reason not in self._reasons:
                self._reasons.add(reason)
                self._report(f"the job could not be inspected: {reason}")

    async def look(self, *, ended: str = "", failed: bool = False) -> None:
        """Read and show the state once; ``ended`` says how the job ended."""
        job = await self._view.status()
        if not ended:
            for line in self._alarms.add(job.alarms, asyncio.get_running_loop().time()):
                self._report(line)
        for sink in self.sinks:
            sink.take(job)
        if self.dashboard is None and not self._is_written:
            return
        if self._painted != (job.job, job.started):  # agents run one job after another
            self._painter, self._painted = Painter(), (job.job, job.started)
            self._schedule = None
        self._job = job
        picture = self._painter.paint(job, ended=ended, schedule=self._schedule) | {"failed": failed}
        if self.dashboard is not None:
            await self.dashboard.show(picture)
        now = asyncio.get_running_loop().time()
        if self._is_written and (ended or now >= self._written_at + WRITE_SECONDS):
            self._written_at = now
            await self._write(picture)

    async def pull(self) -> None:
        """Ask ranks for the parts of pages beyond summaries, if a page is open, or it is time to keep the run."""
        job, now = self._job, asyncio.get_running_loop().time()
        if job is None:
            return
        page = None if self.dashboard is None else self.dashboard.dashboard
        is_kept = self._is_written and now >= self._pulled_at + WRITE_SECONDS
        if is_kept:
            self._pulled_at = now
        if is_kept or (page is not None and page.browsers and now >= self._drawn_at + DRAW_SECONDS):
            self._drawn_at = now
            schedule = await view_pipeline(self._view, job)
            if self._job is not None and self._job.started == job.started:
                self._schedule = schedule or self._schedule
        read_at = None if page is None else page.lines_read_at
        if is_kept or (read_at is not None and now < read_at + READ_SECONDS):
            await self._follower.look(job)

    async def _write(self, picture: dict[str, object]) -> None:
        assert self._directory is not None
        document = {"picture": picture, "lines": self.tail.after(0)}
        try:
            await asyncio.to_thread(write_run, self._directory, document)
        except OSError as error:
            self._is_written = False
            self._report(f"the run cannot be kept for `asyncpar report`: {error}")

    async def finish(self, outcome: JobOutcome) -> None:
        """Show the end of the job."""
        if not self.is_active:
            return
        ended = f"The job has ended with exit code {outcome.exit_code}."
        first = next(iter(outcome.message.splitlines()), "")
        await self._try(partial(self.look, ended=f"{ended} {first}".strip(), failed=outcome.exit_code != 0))
        if self.sinks:
            await asyncio.gather(*(asyncio.to_thread(sink.close, ended) for sink in self.sinks))


@asynccontextmanager
async def observe_job(
    options: ObserverOptions,
    view: ShownJob,
    *,
    own: Callable[[], Sequence[RankReport]],
    directory: Path | None,
    report: Callable[[str], None],
    reports_alarms: bool = True,
) -> AsyncIterator[Observers]:
    """Show the job of ``view`` inside the block, and the ranks of this host, ``own()``, in metrics.

    The run is kept for a report in ``directory`` (None: it is not).  A process that neither shows the job to users nor
    ``reports_alarms`` (as the launcher of the whole job does, which also takes sinks from the environment) does not
    read its state.  Raises ``UsageError`` when an address cannot be bound, or a package that an option needs is
    missing.
    """
    observers = Observers(view, report, directory, own)
    observers.is_active = reports_alarms or options.shows_job or directory is not None
    async with AsyncExitStack() as stack:
        if options.metrics is not None:
            _serve_metrics(options.metrics, own, stack, report)
        if options.dashboard is not None:
            view.changed(dashboard=await _serve_dashboard(options, view, observers, stack, report))
        sinks = names_of_sinks(options.sinks, os.environ) if reports_alarms else options.sinks
        observers.sinks += _start_sinks(sinks, report)
        observing = asyncio.create_task(observers.run(), name="asyncpar observers")
        try:
            yield observers
        finally:
            observing.cancel()
            await asyncio.wait({observing})


def _start_sinks(names: tuple[str, ...], report: Callable[[str], None]) -> list[SinkThread]:
    loop = asyncio.get_running_loop()
    sinks = [SinkThread(name, load_sink(name), lambda text: _report_later(loop, report, text)) for name in names]
    for sink in sinks:
        sink.start()
    return sinks


def _report_later(loop: asyncio.AbstractEventLoop, report: Callable[[str], None], text: str) -> None:
    with suppress(RuntimeError):  # the launcher has ended
        loop.call_soon_threadsafe(report, text)


async def _serve_dashboard(
    options: ObserverOptions, view: ShownJob, observers: Observers, stack: AsyncExitStack, report: Callable[[str], None]
) -> str:
    try:
        from asyncpar.dashboard.server import DashboardServer
    except ImportError as error:
        raise UsageError("--dashboard: needs aiohttp; install asyncpar[dashboard]") from error
    assert options.dashboard is not None
    host, port = split_address(options.dashboard)
    server = DashboardServer(
        host,
        port,
        names=options.dashboard_names,
        tail=observers.tail,
        output=partial(read_output, view),
        flight=partial(view_flight, view),
    )
    await stack.enter_async_context(server)
    observers.dashboard = server
    report(f"the dashboard is at {server.url}")
    return server.url


def _serve_metrics(
    address: str, own: Callable[[], Sequence[RankReport]], stack: AsyncExitStack, report: Callable[[str], None]
) -> None:
    try:
        from asyncpar.observe.prometheus import MetricsServer
    except ImportError as error:
        raise UsageError("--metrics: needs prometheus_client; install asyncpar[metrics]") from error
    name, port = split_address(address)
    server = stack.enter_context(MetricsServer(name, port, own))
    report(f"metrics are at {server.url}")
