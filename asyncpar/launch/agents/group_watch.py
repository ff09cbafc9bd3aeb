"""The ranks of a job on all hosts of a group of agents, as the agent of one host shows them.

Its own ranks it knows; the agents of the other hosts are asked when somebody looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from asyncpar.errors import AsyncparError
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.requests import HostObserved, ObserveRequest
from asyncpar.launch.host_watch import HostWatch
from asyncpar.net.membership.world_messages import GroupHost, WorldGroup, WorldStatus
from asyncpar.net.transport.rpc import Credentials
from asyncpar.observe.alarms import find_alarms
from asyncpar.observe.summary import HostSummary, JobSummary, RankAnswer, RankReport, unpack

_ANSWER_SECONDS: Final = 1.8
"""How long agents may take; ranks that do not answer are reported by them before that, and commands wait longer."""

_NO_ANSWER: Final = "the agent of its host does not answer"


@dataclass(frozen=True, slots=True)
class GroupWatch:
    """A `JobWatch` of the agent of host ``name``; ``base`` has what does not change."""

    base: JobSummary
    name: str
    group: WorldGroup
    watch: HostWatch
    credentials: Credentials

    async def status(self) -> JobSummary:
        """See ``JobWatch``.  Hosts whose agents do not answer are named in alarms, with their ranks."""
        known, answers = await self._ask(ObserveRequest())
        hosts = [unpack(answer.summary, HostSummary) for answer in answers.values() if answer is not None]
        world = known.world
        job = msgspec.structs.replace(
            self.base,
            time=time.time(),
            nnodes=len(known.hosts),
            world_size=0 if world is None else len(world.members),
            generation=0 if world is None else world.generation,
            hosts=tuple(latest_ranks(hosts)),
        )
        return msgspec.structs.replace(job, alarms=(*_name_silent(known, answers), *find_alarms(job)))

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        """See ``JobWatch``."""
        wanted = None if ranks is None else tuple(ranks)
        known, answers = await self._ask(ObserveRequest(kind=kind, ranks=wanted))
        collected: list[RankAnswer] = []
        for host, answer in answers.items():
            if answer is not None:
                collected += answer.ranks
            else:
                lost = (rank for rank in ranks_of(host, known) if wanted is None or rank in wanted)
                collected += [RankAnswer(rank=rank, host=host, error=_NO_ANSWER) for rank in lost]
        return sorted(collected, key=lambda answer: answer.rank)

    async def _ask(self, request: ObserveRequest) -> tuple[WorldStatus, Mapping[str, HostObserved | None]]:
        """Return what the group is, and what each host but witnesses answers; None: nothing."""
        known = await self.group.status()
        hosts = [host for host in known.hosts if not host.is_witness]
        if all(host.name != self.name for host in known.hosts):  # it is not in the group yet, or not any more
            hosts.append(GroupHost(name=self.name, address=""))
        answers = await asyncio.gather(*(self._ask_host(host, request) for host in hosts))
        return known, dict(zip((host.name for host in hosts), answers, strict=True))

    async def _ask_host(self, host: GroupHost, request: ObserveRequest) -> HostObserved | None:
        if host.name == self.name:
            return await request.answer(self.watch)
        try:
            return await ControlClient(host.address, self.credentials, seconds=_ANSWER_SECONDS).observe(request)
        except AsyncparError:
            return None


def latest_ranks(hosts: Iterable[HostSummary]) -> list[HostSummary]:
    """Return ``hosts`` with one report per rank: that of the latest world, if several processes have had its number."""
    hosts = list(hosts)
    latest: dict[int, RankReport] = {}
    for report in (report for host in hosts for report in host.ranks):
        before = latest.get(report.rank)
        if before is None or _newness(report) > _newness(before):
            latest[report.rank] = report
    return [
        msgspec.structs.replace(host, ranks=tuple(report for report in host.ranks if latest[report.rank] is report))
        for host in hosts
    ]


def _newness(report: RankReport) -> tuple[int, bool]:
    return -1 if report.summary is None else report.summary.generation, report.condition != "ended"


def ranks_of(host: str, known: WorldStatus) -> list[int]:
    """Return the ranks that ``host`` has in the last world."""
    members = () if known.world is None else known.world.members
    return [rank for rank, member in enumerate(members) if member.host == host]


def _name_silent(known: WorldStatus, answers: Mapping[str, HostObserved | None]) -> list[str]:
    addresses = {host.name: host.address for host in known.hosts}
    lines = []
    for host, answer in answers.items():
        if answer is None:
            ranks = ranks_of(host, known)
            of_ranks = f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
            lines.append(f"the agent{of_ranks} on {host} ({addresses[host]}) does not answer; look on that host")
    return lines
