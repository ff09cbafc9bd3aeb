"""A job as the process that serves its coordinator sees it: the reports of all hosts' agents, and requests to them."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.harmless import harmless_values
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.job import LaunchJob
from asyncpar.observe.alarms import find_alarms
from asyncpar.observe.summary import MOST_PAST, HostSummary, JobSummary, PastGeneration, RankAnswer, unpack

_COLLECT_SECONDS: Final = 1.2
"""Seconds that the agents of other hosts may take; they report ranks that do not answer before that."""

Send = Callable[[pb.AgentCommand], None]


def describe_job(job: LaunchJob) -> JobSummary:
    """Return the summary of a job before it begins."""
    now = time.time()
    return JobSummary(
        job=job.placement.job,
        pid=os.getpid(),
        time=now,
        started=now,
        phase="forming",
        command=job.command,
        nnodes=job.options.nnodes,
        log_directory="" if job.log_directory is None else str(job.log_directory),
    )


class JobWatch(Protocol):
    """The requests of commands to a launcher or an agent."""

    async def status(self) -> JobSummary:
        """Return the current state of the job, as far as it is known here."""
        ...

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        """Return the reports of ``kind`` of ``ranks`` (None: all), by rank."""
        ...


class ShownJob(JobWatch, Protocol):
    """A job that is shown to users while it runs."""

    def changed(self, **fields: object) -> None:
        """Apply changes to the summary's fields about the job itself."""
        ...


class HostOnly:
    """The part of a job on this host, as seen by a launcher that does not serve the coordinator."""

    def __init__(self, base: JobSummary, watch: HostWatch) -> None:
        self._base = base
        self._watch = watch

    def changed(self, **fields: object) -> None:
        """See ``ShownJob``."""
        self._base = msgspec.structs.replace(self._base, **fields)

    async def status(self) -> JobSummary:
        return msgspec.structs.replace(self._base, time=time.time(), hosts=(self._watch.summary(),))

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        return await self._watch.collect(kind, ranks)


class WholeJob:
    """All hosts of a job.  The coordinator feeds it; ``base`` has the constant fields."""

    def __init__(self, base: JobSummary) -> None:
        self._base = base
        self._hosts: dict[int, tuple[HostSummary, float]] = {}
        self._agents: dict[int, tuple[str, Send]] = {}
        self._requests = itertools.count(1)
        self._collecting: dict[int, _Collecting] = {}

    def arrived(self, agent: int, host: str, send: Send) -> None:
        """Add an agent that has connected; ``send`` passes commands to it as long as it stays connected."""
        self._agents[agent] = (host, send)

    def left(self, agent: int) -> None:
        """Stop sending requests to an agent that is lost."""
        self._agents.pop(agent, None)
        for collecting in self._collecting.values():
            collecting.agent_done(agent)

    def changed(self, **fields: object) -> None:
        """See ``ShownJob``."""
        self._base = msgspec.structs.replace(self._base, **fields)

    def began(self, generation: int, world_size: int, *, restarts: int, reason: str) -> None:
        """Record that ranks begin; ``reason`` is why those of the previous generation ended, "" if there were none."""
        past = self._base.past
        if reason:
            past = (*past, PastGeneration(generation=generation - 1, time=time.time(), reason=reason))[-MOST_PAST:]
        self.changed(generation=generation, world_size=world_size, restarts=restarts, past=past)

    def take(self, agent: int, event: pb.AgentEvent) -> bool:
        """Take an event of an agent if it is for this view; return whether it was."""
        match event.WhichOneof("event"):
            case "observed":
                with suppress(msgspec.DecodeError):
                    self._hosts[agent] = harmless_values(unpack(event.observed.summary, HostSummary)), time.monotonic()
            case "collected":
                collecting = self._collecting.get(event.collected.request)
                if collecting is not None:
                    collecting.take(agent, event.collected)
            case _:
                return False
        return True

    def summary(self) -> JobSummary:
        now = time.monotonic()
        hosts = [summary.aged(now - at) for _, (summary, at) in sorted(self._hosts.items())]
        whole = msgspec.structs.replace(self._base, time=time.time(), hosts=tuple(hosts))
        return msgspec.structs.replace(whole, alarms=find_alarms(whole))

    async def status(self) -> JobSummary:
        return self.summary()

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        number, wanted = next(self._requests), None if ranks is None else list(ranks)
        collecting = self._collecting[number] = _Collecting(set(self._agents))
        try:
            for _, send in self._agents.values():
                send(pb.AgentCommand(collect=pb.Collect(request=number, kind=kind, ranks=wanted or ())))
            with suppress(TimeoutError):
                async with asyncio.timeout(_COLLECT_SECONDS):
                    await collecting.is_over.wait()
        finally:
            del self._collecting[number]
        answers = collecting.answers
        for agent in collecting.waiting:
            host = self._agents[agent][0] if agent in self._agents else "?"
            silent = self._hosts.get(agent)
            ranks_of_host = [] if silent is None else [report.rank for report in silent[0].ranks]
            answers += [RankAnswer(rank=rank, host=host, error="its agent does not answer") for rank in ranks_of_host]
        return sorted(answers, key=lambda answer: answer.rank)


class _Collecting:
    """Answers of several agents to one request."""

    def __init__(self, agents: set[int]) -> None:
        self.waiting = agents
        self.answers: list[RankAnswer] = []
        self.is_over = asyncio.Event()
        if not agents:
            self.is_over.set()

    def take(self, agent: int, message: pb.HostCollected) -> None:
        if message.answer:
            with suppress(msgspec.DecodeError):
                self.answers.append(unpack(message.answer, RankAnswer))
        if message.is_last:
            self.agent_done(agent)

    def agent_done(self, agent: int) -> None:
        self.waiting.discard(agent)
        if not self.waiting:
            self.is_over.set()
