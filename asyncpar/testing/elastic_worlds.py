"""Elastic worlds in one process, for tests: members are tasks, which can be killed, drained, and join later.

The decisions are made by production code.  One host runs the agent (``HostAgent``), alone in a group whose only voter
never fails; its job has many slots.  The process of a slot is idle until ``start`` gives it a program, which runs as a
task and gets its worlds from the agent over its pipe (``PipeWorlds``).  The processes and their connections are
replaced (``task_slots.py``), and so is the disk with the votes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final, Self

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.errors import UsageError
from asyncpar.hosts.lineage import Decision, Lineage
from asyncpar.hosts.messages import HostCommand, JobOpened, WorldAnnounced, WorldChange
from asyncpar.hosts.network import AnswerNewcomer, OnDown, OnUp, PeerConnection, TakeFrame
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import encode_record
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.testing.simulation.agents import QuietHost, simulated_job
from asyncpar.testing.simulation.disk import SimulatedDisk
from asyncpar.testing.task_slots import Main, TaskProcess, TaskSlots

_HOST: Final = "host"
_SLOTS: Final = 32
"""The number of members that may run at a time."""
_LAST_CALL: Final = 0.01
"""Seconds for which the agent waits for members that arrive together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWorld:
    """A world that the agent has announced; members have the names with which they were started."""

    generation: int
    members: tuple[str, ...]
    """The names of the members, in the order of their ranks."""
    lineage: Lineage
    decision: Decision
    change: WorldChange


class ElasticWorlds:
    """Runs members of an elastic job as tasks: ``async with ElasticWorlds(4) as worlds``.

    ``size`` members form the first world: the agent gets their arrivals together.  ``start`` runs ``main(source)``,
    that is, ``ap.elastic(source=source)`` and the rest of the program; members that are started later join.  The agent
    notices a killed member ``notice`` seconds later.  At the end, running members are killed.
    """

    def __init__(self, size: int, *, notice: float = 0.0) -> None:
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        """The tasks of all members so far, by name."""
        self.worlds: list[TaskWorld] = []
        """All worlds so far."""
        self.lines: list[str] = []
        """The lines that the agent has printed."""
        self._slots = TaskSlots(first=size, notice=notice)
        self._members: dict[str, TaskProcess] = {}
        self._names: dict[str, str] = {}
        """The names of members, by those that the agent has given them."""
        self._formed = asyncio.Event()
        self._service: WorldService | None = None
        self._agent: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        votes = VoteFile(Path("votes"), job="agents", disk=SimulatedDisk(Random(0)))
        service = self._service = _LoneService(self._announced, votes)
        await service.start()
        quiet: Any = QuietHost()
        slots: Any = self._slots
        agent = HostAgent(
            service,
            HostPlace(host=_HOST, host_id=_HOST, bind="", secret_file="", environment={}),
            rendezvous=quiet,
            display=quiet,
            reaper=quiet,
            on_line=self.lines.append,
            processes=lambda _record, _place, *, feed, **_: slots.report_to(feed),
        )
        self._agent = asyncio.create_task(agent.run(), name="agent")
        job = simulated_job((1, 1), slots=_SLOTS, last_call=_LAST_CALL)
        service.report(JobOpened(number=1, terms=job.terms, record=encode_record(job)))
        await self._slots.are_there.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._service is not None
        assert self._agent is not None
        for name in self._members:
            self.kill(name)
        if self.tasks:
            await asyncio.wait(self.tasks.values())
        has_ended = self._agent.done()
        self._agent.cancel()
        await asyncio.wait({self._agent})
        await self._service.stop()
        if has_ended:
            self._agent.result()

    def start(self, name: str, main: Main) -> asyncio.Task[Any]:
        """Run ``main`` as member ``name``, and return its task."""
        if name in self.tasks:
            raise UsageError(f"name: a member was called {name!r} before; each incarnation needs a name of its own")
        process = self._members[name] = self._slots.run(main, name=name)
        assert process.task is not None
        self._names[process.pipe.member] = name
        self.tasks[name] = process.task
        return process.task

    def kill(self, name: str) -> None:
        """Make a member disappear like a killed process: it sends nothing more, and runs no further."""
        if self.is_running(name):
            self._slots.kill(self._members[name])

    def drain(self, name: str) -> None:
        """Make a member ask to leave at the end of a step, like a process that gets SIGTERM."""
        self._members[name].source.ask_to_leave(lambda: None)

    def is_running(self, name: str) -> bool:
        """Return whether a member was neither killed nor has left."""
        return name in self._members and self._members[name].is_running

    @property
    def present(self) -> list[str]:
        """The members of the current world that are running."""
        return [name for name in self.worlds[-1].members if self.is_running(name)] if self.worlds else []

    async def formed(self, count: int) -> None:
        """Wait until ``count`` worlds have been announced."""
        while len(self.worlds) < count:
            self._formed.clear()
            await self._formed.wait()

    def name_of(self, member: str) -> str:
        """Return the name with which a member was started, given its name in messages of production."""
        return self._names[member]

    def _announced(self, world: WorldAnnounced) -> None:
        """Record a world that the members are about to get."""
        if not world.members:  # all were lost
            return
        change = world.change
        noted = TaskWorld(
            generation=world.generation,
            members=self._all_named(placed.name for placed in world.members),
            lineage=world.lineage,
            decision=world.decision,
            change=replace(change, joined=self._all_named(change.joined), left=self._all_named(change.left)),
        )
        self.worlds.append(noted)
        self._formed.set()

    def _all_named(self, members: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.name_of(member) for member in members)


class _LoneService(WorldService):
    """The group of one host; calls ``on_world`` with each world before the agent gets it."""

    def __init__(self, on_world: Callable[[WorldAnnounced], None], votes: VoteFile) -> None:
        super().__init__(name=_HOST, network=_NoPeers(), join=(), votes=votes)
        self._on_world = on_world

    @property
    def commands(self) -> AsyncIterator[HostCommand]:
        return self._noted(super().commands)

    async def _noted(self, commands: AsyncIterator[HostCommand]) -> AsyncIterator[HostCommand]:
        async for command in commands:
            if isinstance(command, WorldAnnounced):
                self._on_world(command)
            yield command


class _NoPeers:
    """See ``GroupNetwork``; for a host that is alone."""

    address = _HOST

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        """Do nothing: no peer connects."""

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> PeerConnection:
        del own, on_up, on_down
        raise AssertionError(f"expected no other host in the group, got {node} at {address}")

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        del request
        raise ConnectionError(f"nobody serves at {address}")
