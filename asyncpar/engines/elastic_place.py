"""The agent of one place of an elastic job: it joins the group of the caller's agent, and carries out its decisions."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from asyncpar.core.addresses import join_address
from asyncpar.core.config.secret import Secret
from asyncpar.engines.elastic_view import serve_elastic
from asyncpar.engines.interface import Interrupt, Kill, PlaceCommand, PlaceEvent, PlaceOrder, PlaceReport
from asyncpar.engines.place_agent import SECRET_FILE, EventDisplay, PlaceAgent, PlaceRun, make_report
from asyncpar.launch.agents.group_part import take_part
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import JobEnd
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.host import host_id
from asyncpar.net.transport.rpc import Credentials


def host_of(number: int) -> str:
    """Return the host name of place ``number`` among agents: places may share a machine."""
    return f"place-{number}"


def make_agent(order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> PlaceRun:
    """Return the agent for ``order``."""
    return ElasticPlace(order, take) if order.group else PlaceAgent(order, take)


class ElasticPlace(PlaceRun):
    """Runs ranks of an elastic job."""

    def __init__(self, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> None:
        super().__init__(order, take)
        self._agent: HostAgent | None = None

    def obey(self, command: PlaceCommand) -> None:
        """See ``PlaceRun``: the first interrupt lets the ranks leave, the second one ends them."""
        match command:
            case Interrupt() if self._agent is not None:
                self._agent.leave("the caller was interrupted", grace=self._order.grace)
            case Interrupt() | Kill() if self._running is not None:
                self._running.cancel()

    async def _live(self, directory: Path, reaper: ReaperClient) -> bool:
        """See ``PlaceRun``: it takes part again if the others have gone on without this place."""
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
                self._report(_report_end(directory, end, part.agent))
            return part.group.is_dismissed


def _report_end(directory: Path, end: JobEnd | None, agent: HostAgent) -> PlaceReport:
    exit_code, failure = agent.failure
    if end is not None:
        exit_code, failure = end.exit_code or exit_code, end.message or failure
    message = failure or ("" if end is not None else "it left the job")
    return make_report(directory, agent.crashes, exit_code=exit_code, message=message)
