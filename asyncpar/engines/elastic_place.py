"""The agent of one place of an elastic job: it joins the group of the caller's agent, and carries out its decisions."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncpar.core.addresses import join_address
from asyncpar.core.config.secret import Secret
from asyncpar.engines.interface import Interrupt, Kill, PlaceCommand, PlaceEvent, PlaceOrder, PlaceReport
from asyncpar.engines.place_agent import (
    SECRET_FILE,
    EventDisplay,
    PlaceAgent,
    read_all,
    report_of,
    write_order,
)
from asyncpar.engines.rank_program import error_file, value_file
from asyncpar.errors import AsyncparError
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.host import host_id
from asyncpar.net.transport.rpc import Credentials

if TYPE_CHECKING:
    from asyncpar.launch.agents.host_agent import HostAgent
    from asyncpar.launch.agents.job_record import JobEnd

_AGAIN_SECONDS: Final = 1.0
"""Seconds until an agent that was declared lost joins again."""


def host_of(number: int) -> str:
    """Return the host name of place ``number`` among agents: places may share a machine."""
    return f"place-{number}"


def make_agent(order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> PlaceAgent | ElasticPlace:
    """Return the agent for ``order``."""
    return ElasticPlace(order, take) if order.group else PlaceAgent(order, take)


class ElasticPlace:
    """Runs ranks of an elastic job; once.  Used as ``PlaceAgent`` is."""

    def __init__(self, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> None:
        self._order = order
        self._take = take
        self._agent: HostAgent | None = None
        self._running: asyncio.Task[None] | None = None
        self._has_reported = False

    def obey(self, command: PlaceCommand) -> None:
        """Carry out ``command``: the first interrupt lets the ranks leave, the second one ends them."""
        match command:
            case Interrupt() if self._agent is not None:
                self._agent.leave("the caller was interrupted", grace=self._order.grace)
            case Interrupt() | Kill() if self._running is not None:
                self._running.cancel()

    async def run(self) -> None:
        """Run ranks until the job is over; the last event is a ``PlaceReport``.  When cancelled, kill them first."""
        self._running = running = asyncio.create_task(self._run(), name=f"asyncpar elastic place {self._order.number}")
        try:
            await asyncio.wait({running})
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        if running.cancelled():
            self._report(PlaceReport(exit_code=1, message="it was killed"))
        elif (error := running.exception()) is not None:
            self._report(report_of(error))

    def _report(self, report: PlaceReport) -> None:
        """Report once: the caller need not wait until this host has left the group."""
        if not self._has_reported:
            self._has_reported = True
            self._take(report)

    async def _run(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="asyncpar-place-"))  # mode 0700
        reaper = ReaperClient()
        try:
            reaper.add_path(directory)
            write_order(self._order, directory)
            while True:
                if not await self._live(directory, reaper):
                    return
                await asyncio.sleep(_AGAIN_SECONDS)
        except AsyncparError as error:
            self._report(PlaceReport(exit_code=1, message=str(error)))
        finally:
            reaper.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def _live(self, directory: Path, reaper: ReaperClient) -> bool:
        """Take part once, and report; return whether the others have gone on without this place meanwhile."""
        # These take half a second to import, which jobs that are not elastic need not spend.
        from asyncpar.engines.elastic_view import serve_elastic
        from asyncpar.launch.agents.group_part import take_part
        from asyncpar.launch.agents.slot_processes import HostPlace

        order, host = self._order, host_of(self._order.number)
        place = HostPlace(
            host=host,
            host_id=host_id(host),
            bind=order.address,
            secret_file=str(directory / SECRET_FILE),
            environment=os.environ | order.environment,
        )
        credentials = Credentials(Secret(order.secret))
        async with AsyncExitStack() as stack:
            part = await take_part(
                stack,
                place,
                listen=join_address(order.address, 0),
                join=(order.group,),
                credentials=credentials,
                votes=directory,
                display=EventDisplay(self._take),
                reaper=reaper,
                only_job=True,
                is_for_one_job=True,
                on_line=lambda _: None,  # the caller's agent prints it once for all
            )
            self._agent = part.agent
            async with serve_elastic(order.job, part, credentials, reaper, place=host):
                end = await part.agent.run()
            if not part.group.is_dismissed:
                self._report(_make_report(directory, end, part.agent))
            return part.group.is_dismissed


def _make_report(directory: Path, end: JobEnd | None, agent: HostAgent) -> PlaceReport:
    exit_code, failure = agent.failure
    if end is not None:
        exit_code, failure = end.exit_code or exit_code, end.message or failure
    return PlaceReport(
        values=read_all(directory, value_file),
        errors=read_all(directory, error_file),
        failures=list(agent.crashes),
        exit_code=exit_code,
        message=failure or ("" if end is not None else "it left the job"),
    )
