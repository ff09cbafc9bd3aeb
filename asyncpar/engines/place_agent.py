"""The agent of one place: it runs the ranks of a ``PlaceOrder`` on the event loop of the engine's process there.

Everything that a rank must not leave behind is in one private directory, which the reaper removes if this process is
killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, closing
from pathlib import Path

from asyncpar.core.addresses import join_address
from asyncpar.core.config.secret import Secret
from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.engines.interface import (
    BeginRanks,
    Interrupt,
    Kill,
    PlaceCommand,
    PlaceEvent,
    PlaceOrder,
    PlaceOutput,
    PlaceProgress,
    PlaceReport,
    PlaceServes,
)
from asyncpar.engines.rank_program import CALL_FILE, PATHS_FILE, error_file, value_file
from asyncpar.errors import AsyncparError
from asyncpar.harmless import harmless_bytes
from asyncpar.launch.agents.ending import EndRequests
from asyncpar.launch.agents.fixed_part import record_fixed, run_part, take_fixed_part
from asyncpar.launch.display import Display
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.host_placement import HostPlacement
from asyncpar.launch.job import JobSecret, LaunchJob
from asyncpar.launch.options import LaunchOptions, ProgramKind
from asyncpar.launch.rank_process import command_line
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.credentials import write_secret
from asyncpar.net.membership.host import host_id, host_name

RECONNECT_SECONDS = 1.0
SECRET_FILE = "secret"
_PROGRESS_SECONDS = 0.5
_KILL_PATIENCE = 3.0
_AGAIN_SECONDS = 1.0
"""Seconds until an agent that was declared lost joins again."""
_log = logging.getLogger(__name__)


class EventDisplay(Display):
    """Passes output and progress on as events of a place."""

    def __init__(self, take: Callable[[PlaceEvent], None]) -> None:
        super().__init__(every=_PROGRESS_SECONDS)
        self._take = take

    async def lines(self, text: bytes, *, is_output: bool = False) -> None:
        shown = text if is_output else harmless_bytes(text)
        self._take(PlaceOutput(shown, is_error=True, is_message=not is_output))

    async def raw(self, chunk: bytes) -> None:
        if chunk:
            self._take(PlaceOutput(chunk, is_error=False))

    async def show(self, prefix: str, record: ProgressRecord) -> None:
        self._take(PlaceProgress(prefix, record))


class PlaceRun(ABC):
    """Runs the ranks of one order; once.  ``obey`` may be called at any time, even before and after."""

    def __init__(self, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> None:
        self._order = order
        self._take = take
        self._running: asyncio.Task[None] | None = None
        self._has_reported = False

    @abstractmethod
    def obey(self, command: PlaceCommand) -> None:
        """Carry out ``command``."""

    @abstractmethod
    async def _live(self, directory: Path, reaper: ReaperClient) -> bool:
        """Take part in the job, and report; return whether to do so again.  Ranks read the files in ``directory``."""

    async def run(self) -> None:
        """Run the ranks to their end; the last event is a ``PlaceReport``, whatever happens.

        When cancelled, it kills them first.
        """
        self._running = running = asyncio.create_task(self._run(), name=f"asyncpar place {self._order.number}")
        try:
            await asyncio.wait({running})
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        if running.cancelled():  # or its agent did not end
            self._report(PlaceReport(exit_code=1, message="it was killed"))
        elif (error := running.exception()) is not None:
            _log.error("place %d broke", self._order.number, exc_info=error)
            self._report(report_of(error))

    def _report(self, report: PlaceReport) -> None:
        """Report once: the caller need not wait until this host has left the group."""
        if not self._has_reported:
            self._has_reported = True
            self._take(report)

    async def _run(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="asyncpar-place-"))  # mode 0700
        try:
            with closing(ReaperClient()) as reaper:
                reaper.add_path(directory)
                write_order(self._order, directory)
                while True:
                    if not await self._live(directory, reaper):
                        return
                    await asyncio.sleep(_AGAIN_SECONDS)
        except AsyncparError as error:
            self._report(PlaceReport(exit_code=1, message=str(error)))
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class PlaceAgent(PlaceRun):
    """Runs ranks of a job with a fixed number of places."""

    def __init__(self, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> None:
        super().__init__(order, take)
        self._coordinator: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ending: EndRequests | None = None
        self._interrupts = 0
        self._is_killed = False

    def obey(self, command: PlaceCommand) -> None:
        """See ``PlaceRun``: the first interrupt ends the job, the second one kills the ranks."""
        match command:
            case BeginRanks(coordinator) if not self._coordinator.done():
                self._coordinator.set_result(coordinator)
            case Interrupt():
                self._interrupt()
            case Kill() if not self._is_killed:
                self._is_killed = True
                while self._interrupts < 2:  # the second one kills
                    self._interrupt()
                if self._running is not None:
                    asyncio.get_running_loop().call_later(_KILL_PATIENCE, self._running.cancel)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._ending is not None:
            self._ending.signalled(signal.SIGINT)
        elif self._running is not None:  # nothing has begun
            self._running.cancel()

    async def _live(self, directory: Path, reaper: ReaperClient) -> bool:
        order = self._order
        job = self._job(directory, "" if order.number == 0 else await self._coordinator)
        record, secret = record_fixed(job), JobSecret(Secret(order.secret), directory / SECRET_FILE)
        ending = EndRequests(job.placement.host, record, grace=order.grace)
        async with AsyncExitStack() as stack:
            display = EventDisplay(self._take)
            part = await take_fixed_part(stack, job, record, secret, display=display, reaper=reaper, is_embedded=True)
            ending.attach(part.group, part.agent)
            self._ending = ending
            if part.is_first:
                self._take(PlaceServes(part.agent.address))
            outcome = await run_part(job, part, reaper, ending)
            failures = part.agent.crashes if part.is_first else ()
            report = make_report(directory, failures, exit_code=outcome.exit_code, message=outcome.message)
        self._report(report)
        return False

    def _job(self, directory: Path, coordinator: str) -> LaunchJob:
        order, host = self._order, host_name()
        options = LaunchOptions(
            program="asyncpar.engines.rank_program",
            arguments=(str(directory),),
            kind=ProgramKind.MODULE,
            nnodes=order.places,
            node_rank=order.number,
            nproc=order.slots,
            endpoint=coordinator or join_address(order.address, 0),
            job=order.job,
            timeout=order.timeout,
            max_restarts=order.max_restarts,
            grace=order.grace,
            reconnect=RECONNECT_SECONDS,
            transport=order.transport,
            secret_file=str(directory / SECRET_FILE),
            full_traceback=True,
        )
        placement = HostPlacement(
            host=host,
            host_id=host_id(host),
            nproc=order.slots,
            serve_at=(order.address, 0) if order.number == 0 else None,
            may_connect=False,
            coordinator=coordinator,
            bind=order.address,
            meets_at=order.address,
            master_addr=order.address,
            job=order.job,
        )
        return LaunchJob(
            options=options,
            placement=placement,
            command=command_line(options.kind, options.program, options.arguments),
            log_directory=None,
            environment=os.environ | order.environment,
        )


def make_report(directory: Path, failures: Iterable[RankEnd], *, exit_code: int, message: str) -> PlaceReport:
    """Return the report of a place whose ranks have left their files in ``directory``."""
    return PlaceReport(
        values=read_all(directory, value_file),
        errors=read_all(directory, error_file),
        failures=list(failures),
        exit_code=exit_code,
        message=message,
    )


def report_of(error: BaseException) -> PlaceReport:
    """Return the report of a place that ``error`` has ended."""
    return PlaceReport(exit_code=1, message=f"{type(error).__name__}: {error}")


def write_order(order: PlaceOrder, directory: Path) -> None:
    """Write the files that ranks read into the private ``directory`` of their place."""
    write_secret(directory / SECRET_FILE, Secret(order.secret))
    (directory / CALL_FILE).write_bytes(order.program)
    (directory / PATHS_FILE).write_text(json.dumps([path or os.getcwd() for path in sys.path]))


def read_all(directory: Path, name: Callable[[int], str]) -> dict[int, bytes]:
    """Return the contents of the files that the ranks here have left, by rank."""
    beginning = name(0)[:-1]
    found = {}
    for path in directory.glob(f"{beginning}*"):
        rank = path.name.removeprefix(beginning)
        if rank.isdecimal():
            found[int(rank)] = path.read_bytes()
    return found
