"""The ranks of a job on all hosts of a group of agents, as shown by one agent, or by the launcher that submitted it.

An agent knows the ranks of its own host; it asks the agents of the other hosts when the job is viewed.  The last report
of a host that does not answer is shown with its age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from asyncpar.errors import AsyncparError
from asyncpar.harmless import harmless_values
from asyncpar.hosts.messages import WorldStatus, shown_host
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.host_protocol import ShowWorld
from asyncpar.launch.agents.job_record import ElasticMode, decode_record
from asyncpar.launch.agents.requests import HostObserved, ObserveRequest
from asyncpar.launch.agents.restarted_world import HostRanks
from asyncpar.launch.agents.views import GroupView
from asyncpar.launch.host_watch import ENDED, HostWatch
from asyncpar.net.transport.rpc import Credentials
from asyncpar.observe.alarms import find_alarms
from asyncpar.observe.summary import (
    MOST_PAST,
    HostSummary,
    JobSummary,
    PastGeneration,
    RankAnswer,
    RankReport,
    unpack,
)

_ANSWER_SECONDS: Final = 1.8
"""Seconds that agents may take; they report ranks that do not answer before that, and commands wait longer."""

_NO_ANSWER: Final = "the agent of its host does not answer"


class JobPhase(StrEnum):
    """The phase of a job: hosts gather, ranks run, or it ends."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNow:
    """A group of agents, as far as it decides which agent is asked about which ranks.

    ``hosts`` have the addresses of agents that run ranks, ``ranks`` the ranks of each host in the last world;
    ``number`` is that of the job, 0 for none so far.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    world_size: int = 0
    generation: int = 0
    number: int = 0
    job: str = ""
    command: tuple[str, ...] = ()
    phase: str = ""
    nnodes: int = 0
    """The number of hosts if it is fixed, otherwise 0."""


AskHost = Callable[[str, str, ObserveRequest], Awaitable[HostObserved | None]]
"""Asks the agent of a host, by name and address; None: it does not answer."""


def group_of_status(status: WorldStatus) -> GroupNow:
    """Return the group as one of its members knows it."""
    record = None if status.job is None else decode_record(status.job.record)
    number = 0 if status.job is None else status.job.number
    is_closed = status.closed is not None and status.closed.number == number
    is_restarted = record is not None and record.mode is ElasticMode.RESTART  # then a member is a host
    ranks: dict[str, tuple[int, ...]] = {}
    first = 0
    for member in () if status.world is None else status.world.members:
        after = first + (msgspec.json.decode(member.address, type=HostRanks).slots if is_restarted else 1)
        ranks[member.host], first = (*ranks.get(member.host, ()), *range(first, after)), after
    return GroupNow(
        hosts={host.name: host.address for host in status.hosts if not host.is_witness},
        ranks=ranks,
        world_size=sum(map(len, ranks.values())),
        generation=0 if status.world is None else status.world.generation,
        number=number,
        job="" if record is None else record.name,
        command=() if record is None else (record.program, *record.arguments),
        phase=_phase(number, is_running=not is_closed, has_ranks=bool(ranks)),
        nnodes=record.most_hosts if record is not None and record.is_fixed else 0,
    )


def group_of_view(view: GroupView) -> GroupNow:
    """Return the group as an agent reports it."""
    ranks = {
        host.name: tuple(sorted(one.rank for one in host.ranks if one.rank is not None))
        for host in view.hosts
        if host.ranks
    }
    number = 0 if view.job is None else view.job.number
    is_running = view.job is not None and view.job.state == "running"
    is_restarted = view.job is not None and view.job.mode == ElasticMode.RESTART
    return GroupNow(
        hosts={host.name: host.address for host in view.hosts if host.state != "witness"},
        ranks=ranks,
        world_size=sum(map(len, ranks.values())) if is_restarted else view.world_size,
        generation=view.generation or 0,
        number=number,
        job="" if view.job is None else view.job.name,
        phase=_phase(number, is_running=is_running, has_ranks=any(ranks.values())),
    )


def _phase(number: int, *, is_running: bool, has_ranks: bool) -> str:
    if number == 0:
        return ""
    if not is_running:
        return JobPhase.STOPPING
    return JobPhase.RUNNING if has_ranks else JobPhase.FORMING


@dataclass(slots=True)
class GroupWatch:
    """A `ShownJob` of the job that agents run; ``base`` has the constant fields, ``know`` returns the current group.

    The ranks of the host ``name`` are those of ``own``; "" and None where no agent runs in this process.  ``ask`` asks
    those of other hosts.
    """

    base: JobSummary
    know: Callable[[], Awaitable[GroupNow]]
    ask: AskHost
    name: str = ""
    own: HostWatch | None = None
    _reports: dict[str, tuple[HostSummary, float]] = field(default_factory=dict)
    """By host: its last report, and the time of it."""
    _has_worlds: bool = False
    """Whether the ranks start again with every world."""
    _job: tuple[int, float] = (0, 0.0)
    """The number of the last job, and the time when it was first seen."""

    def changed(self, **fields: object) -> None:
        """See ``ShownJob``."""
        self.base = msgspec.structs.replace(self.base, **fields)

    def began(self, world: ShowWorld) -> None:
        """Show that ranks begin which start again with every world."""
        past = self.base.past
        if world.reason:
            ended = PastGeneration(generation=world.generation - 1, time=time.time(), reason=world.reason)
            past = (*past, ended)[-MOST_PAST:]
        self._has_worlds = True
        self.changed(generation=world.generation, world_size=world.size, restarts=world.restarts, past=past)

    async def status(self) -> JobSummary:
        """See ``JobWatch``.  Alarms name the hosts whose agents do not answer, with their ranks."""
        known, answers = await self._ask(ObserveRequest())
        now = time.monotonic()
        for host, answer in answers.items():
            if answer is not None:
                self._reports[host] = harmless_values(unpack(answer.summary, HostSummary)), now
        if known.phase != JobPhase.STOPPING:  # hosts that leave after the end of the job were part of it
            self._reports = {host: report for host, report in self._reports.items() if host in answers}
        reports = [summary.aged(now - at) for summary, at in self._reports.values()]
        may_be_past = known.phase == JobPhase.RUNNING and not self._has_worlds  # else a slot has its last process
        job = msgspec.structs.replace(
            self.base,
            job=known.job or self.base.job,
            command=self.base.command or known.command,
            time=time.time(),
            started=self._started(known),
            phase=known.phase or self.base.phase,
            nnodes=known.nnodes or len(known.hosts),
            world_size=known.world_size,
            generation=known.generation,
            hosts=tuple(latest_ranks(reports, known.generation if may_be_past else -1)),
            **({} if self._has_worlds else _restarts_of(reports)),
        )
        return msgspec.structs.replace(job, alarms=(*self._name_silent(known, answers), *find_alarms(job)))

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        """See ``JobWatch``."""
        wanted = None if ranks is None else tuple(ranks)
        known, answers = await self._ask(ObserveRequest(kind=kind, ranks=wanted))
        collected: list[RankAnswer] = []
        for host, answer in answers.items():
            if answer is not None:
                collected += answer.ranks
            else:
                lost = (rank for rank in self._ranks_of(host, known) if wanted is None or rank in wanted)
                collected += [RankAnswer(rank=rank, host=shown_host(host), error=_NO_ANSWER) for rank in lost]
        holders = {rank: shown_host(host) for host, held in known.ranks.items() for rank in held}
        seen = {(answer.rank, answer.host) for answer in collected}
        return sorted(
            (  # of several processes with one rank, the one in the last world counts
                answer
                for answer in collected
                if (holder := holders.get(answer.rank, answer.host)) == answer.host or (answer.rank, holder) not in seen
            ),
            key=lambda answer: answer.rank,
        )

    def _started(self, known: GroupNow) -> float:
        """Return when the job began, as far as it was observed here."""
        if known.number != self._job[0]:
            self._job = known.number, time.time()
        return self._job[1] or self.base.started

    async def _ask(self, request: ObserveRequest) -> tuple[GroupNow, Mapping[str, HostObserved | None]]:
        """Return the group, and the answer of each host; None: no answer."""
        known = await self.know()
        hosts = dict(known.hosts)
        if self.own is not None:
            hosts.setdefault(self.name, "")  # it is not in the group yet, or no longer
        answers = await asyncio.gather(*(self._ask_host(host, address, request) for host, address in hosts.items()))
        return known, dict(zip(hosts, answers, strict=True))

    async def _ask_host(self, host: str, address: str, request: ObserveRequest) -> HostObserved | None:
        if self.own is not None and host == self.name:
            return await request.answer(self.own)
        ranks = list[RankAnswer]()
        while (answer := await self.ask(host, address, request)) is not None and answer.rest:
            ranks += answer.ranks
            request = msgspec.structs.replace(request, ranks=answer.rest)
        return None if answer is None else msgspec.structs.replace(answer, ranks=(*ranks, *answer.ranks))

    def _ranks_of(self, host: str, known: GroupNow) -> tuple[int, ...]:
        """Return the ranks of a host that does not answer: those in the last world, or those of its last report."""
        if host in known.ranks:
            return known.ranks[host]
        last = self._reports.get(host)
        return () if last is None else tuple(report.rank for report in last[0].ranks)

    def _name_silent(self, known: GroupNow, answers: Mapping[str, HostObserved | None]) -> list[str]:
        lines = []
        for host, answer in answers.items():
            if answer is None:
                ranks = self._ranks_of(host, known)
                of_ranks = f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
                where = f"{shown_host(host)} ({known.hosts[host]})" if known.hosts[host] else shown_host(host)
                lines.append(f"the agent{of_ranks} on {where} does not answer; look on that host")
        return lines


def ask_with(credentials: Credentials) -> AskHost:
    """Return a function that asks the agents of hosts at their addresses."""

    async def ask(_host: str, address: str, request: ObserveRequest) -> HostObserved | None:
        try:
            return await ControlClient(address, credentials, seconds=_ANSWER_SECONDS).observe(request)
        except AsyncparError:
            return None

    return ask


def _restarts_of(hosts: Iterable[HostSummary]) -> dict[str, Any]:
    """Return the restarts of ranks that live on when others start again, each by itself."""
    past = sorted((one for host in hosts for one in host.past), key=lambda one: one.time)
    return {"restarts": sum(host.restarts for host in hosts), "past": tuple(past[-MOST_PAST:])}


def latest_ranks(hosts: Iterable[HostSummary], generation: int = -1) -> list[HostSummary]:
    """Return ``hosts`` with one report per rank: of several processes that have had its number, the latest world's.

    Ranks that ended before the world of ``generation`` began are no longer part of the job.
    """
    hosts = list(hosts)
    latest: dict[int, RankReport] = {}
    for report in (report for host in hosts for report in host.ranks):
        before = latest.get(report.rank)
        is_past = report.condition == ENDED and _newness(report)[0] < generation
        if not is_past and (before is None or _newness(report) > _newness(before)):
            latest[report.rank] = report
    return [
        msgspec.structs.replace(host, ranks=tuple(report for report in host.ranks if latest.get(report.rank) is report))
        for host in hosts
    ]


def _newness(report: RankReport) -> tuple[int, bool]:
    return -1 if report.summary is None else report.summary.generation, report.condition != ENDED
