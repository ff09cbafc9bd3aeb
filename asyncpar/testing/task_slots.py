"""Processes of an elastic job as tasks on the loop of their agent: stand-ins for ``SlotProcesses`` and ``SocketPipe``.

Processes, pipes and the connections between ranks are objects in memory; the messages are those of production.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import World
from asyncpar.elasticity.donors import SnapshotDescription, SnapshotShelf, StepUpdate
from asyncpar.elasticity.pipe import PipeWorlds, Served
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import LaunchError, PeerLost
from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.pipe_messages import (
    AgentMessage,
    JoinWorld,
    RankMessage,
    decode_agent_line,
    decode_rank_line,
    encode_line,
)
from asyncpar.launch.agents.host_protocol import RankGone, RankWrote, SlotEvent, StartRank, WriteToRank
from asyncpar.launch.failure import RankEnd
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.links import Links

Main: TypeAlias = "Callable[[WorldSource], Coroutine[Any, Any, Any]]"


@dataclass(eq=False)
class TaskProcess:
    """The process of a slot: idle until it has a ``task``, which runs a program."""

    slot: int
    pipe: TaskPipe
    source: PipeWorlds
    task: asyncio.Task[Any] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was neither killed nor has left."""
        return not self.pipe.is_gone and not self.pipe.is_closed


class TaskSlots:
    """See ``SlotProcesses``; processes are idle until ``run`` gives them a program.

    The agent gets the arrivals of the ``first`` members together, and notices a killed one after ``notice`` seconds.
    """

    def __init__(self, *, first: int, notice: float) -> None:
        self.are_there = asyncio.Event()
        """Set when processes have started."""
        self._notice = notice
        self._first = first
        self._arriving: dict[TaskPipe, JoinWorld] | None = {}
        """The arrivals of the first members, until all have arrived; None afterwards."""
        self._feed: Callable[[SlotEvent], None] = lambda _: None
        self._processes: list[TaskProcess] = []
        self._fabrics: dict[int, InprocFabric] = {}

    def report_to(self, feed: Callable[[SlotEvent], None]) -> Self:
        """Pass events to ``feed`` from now on."""
        self._feed = feed
        return self

    def run(self, main: Main, *, name: str) -> TaskProcess:
        """Run ``main`` in the process that has been idle for longest.  Raises ``LaunchError`` if none is idle."""
        process = next((process for process in self._processes if process.task is None and process.is_running), None)
        if process is None:
            raise LaunchError(f"{name}: no process is idle: the job is over, or has a member in every slot")
        process.task = asyncio.create_task(main(process.source), name=f"member {name}")
        process.task.add_done_callback(lambda task: self._has_returned(process, task))
        return process

    def kill(self, process: TaskProcess) -> None:
        """End a process and all its channels at once; the agent notices it later."""
        if not process.pipe.is_gone:
            process.pipe.disappear()
            if process.task is not None:
                process.task.cancel()
            asyncio.get_running_loop().call_later(self._notice, self._ended, process, -signal.SIGKILL)

    def _has_returned(self, process: TaskProcess, task: asyncio.Task[Any]) -> None:
        """Handle the end of a program by itself."""
        if not process.pipe.is_gone:
            process.pipe.disappear()
            code = -signal.SIGKILL if task.cancelled() else 0 if task.exception() is None else 1
            asyncio.get_running_loop().call_soon(self._ended, process, code)

    def _ended(self, process: TaskProcess, code: int) -> None:
        """Report the end of a process."""
        if process in self._processes:
            self._processes.remove(process)
            now, slot, host = asyncio.get_running_loop().time(), process.slot, process.pipe.member.partition("/")[0]
            end = RankEnd(generation=0, rank=slot, local_rank=slot, host=host, pid=slot, returncode=code, at=now)
            self._feed(RankGone(slot, end))

    # -- for pipes -----------------------------------------------------------------------------------------------------

    def pass_on(self, pipe: TaskPipe, message: RankMessage) -> None:
        """Pass a message to the agent, behind all earlier ones; the arrivals of the first members go together."""
        arriving = self._arriving
        if arriving is None or not isinstance(message, JoinWorld):
            self._send(pipe, message)
            return
        arriving[pipe] = message
        present = [one for one in arriving if not one.is_gone]
        if len(present) == self._first:
            self._arriving = None
            for one in present:
                self._send(one, arriving[one])

    def _send(self, pipe: TaskPipe, message: RankMessage) -> None:
        asyncio.get_running_loop().call_soon(self._feed, RankWrote(pipe.member, decode_rank_line(encode_line(message))))

    def shelf(self, member: str) -> SnapshotShelf:
        """Return the snapshots that a member gives to joining ones.  Raises ``PeerLost`` if it is gone."""
        found = (one.pipe.shelf for one in self._processes if one.pipe.member == member and one.is_running)
        shelf = next(found, None)
        if shelf is None:
            raise PeerLost(f"{member} is gone", cause="it is gone")
        return shelf

    def fabric(self, generation: int) -> InprocFabric:
        """Return the connections between the ranks of a world."""
        return self._fabrics.setdefault(generation, InprocFabric())

    # -- see ``SlotProcesses`` -----------------------------------------------------------------------------------------

    @property
    def pids(self) -> Mapping[int, int]:
        return {process.slot: process.slot for process in self._processes}

    def start(self, order: StartRank) -> None:
        pipe = TaskPipe(self, order.member)
        self._processes.append(TaskProcess(order.slot, pipe, PipeWorlds(pipe)))
        self.are_there.set()

    def write(self, order: WriteToRank) -> None:
        for process in self._processes:
            if process.pipe.member == order.member:
                asyncio.get_running_loop().call_soon(
                    process.pipe.deliver, decode_agent_line(encode_line(order.message))
                )

    def signal(self, slot: int, number: int) -> None:
        """Kill a process; one with a program has the grace period after SIGTERM to end by itself."""
        for process in self._processes:
            if process.slot == slot and (number == signal.SIGKILL or process.task is None):
                self.kill(process)

    async def close(self) -> None:
        self._processes.clear()

    async def settle(self) -> None:
        """Do nothing: a task that has ended leaves nothing to wait for."""


class TaskPipe:
    """See ``RankPipe``; the connection of a task to the agent on the same loop."""

    def __init__(self, slots: TaskSlots, member: str) -> None:
        self.member = member
        """The name that the agent has given it."""
        self.is_closed = False
        """Whether the member has left."""
        self.is_gone = False
        """Whether the process of the member has ended."""
        self.shelf: SnapshotShelf | None = None
        self._slots = slots
        self._take: Callable[[AgentMessage], None] | None = None
        self._early: list[AgentMessage] = []
        self._links: Links | None = None
        self._fabric: InprocFabric | None = None

    def deliver(self, message: AgentMessage) -> None:
        """Take a message of the agent; it waits until the pipe is open."""
        if self._take is None:
            self._early.append(message)
        elif self.is_open:
            self._take(message)

    @property
    def is_open(self) -> bool:
        return self._take is not None and not self.is_closed and not self.is_gone

    async def open(self, take: Callable[[AgentMessage], None], end: Callable[[Exception], None]) -> None:
        del end  # the agent outlives its members
        self._take = take
        early, self._early = self._early, []
        for message in early:
            take(message)

    def write(self, message: RankMessage) -> None:
        if self.is_open:
            self._slots.pass_on(self, message)

    async def serve_snapshots(self, shelf: SnapshotShelf) -> str:
        self.shelf = shelf
        return self.member

    def donor(self, name: str, address: str) -> TaskDonor:
        del address  # a member is found by its name
        return TaskDonor(self._slots, name)

    async def serve_links(self, stack: AsyncExitStack, certified: Sequence[int] | None) -> Served:
        del certified

        def bootstrap(world: World, rank: int) -> WorldBootstrap:
            self._fabric = self._slots.fabric(world.generation)
            stack.callback(self._fabric.leave, rank)
            return WorldBootstrap(world=world, rank=rank, connector=InprocConnector(self._fabric), join=self._join)

        return self.member, bootstrap

    def _join(self, links: Links) -> None:
        assert self._fabric is not None
        self._links = links
        self._fabric.join(links)

    async def close(self) -> None:
        self.is_closed = True

    def disappear(self) -> None:
        """End all channels of this member, without a last message."""
        self.is_gone = True
        if self._links is None or self._fabric is None:
            return
        rank = self._links.rank
        self._fabric.leave(rank)
        for other in range(self._links.world.size):
            lane = self._links.link(other).lane if other != rank and self._links.is_up(other) else None
            if lane is not None:
                lane.abort(PeerLost("killed", rank=rank))


class TaskDonor:
    """A member that gives the state to joining ones."""

    def __init__(self, slots: TaskSlots, name: str) -> None:
        self.name = name
        self._slots = slots

    async def position(self) -> int:
        return await self._shelf.position()

    async def pin(self, step: int) -> SnapshotDescription:
        return await self._shelf.pin(step)

    async def block(self, pin: int, name: str, number: int) -> bytes | memoryview:
        return await self._shelf.block(pin, name, number)

    async def update(self, pin: int, number: int) -> StepUpdate:
        return (await self._shelf.update(pin, number)).copied()

    async def lineage(self, pin: int, step: int) -> Lineage:
        return await self._shelf.lineage(pin, step)

    async def unpin(self, pin: int) -> None:
        await self._shelf.unpin(pin)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    @property
    def _shelf(self) -> SnapshotShelf:
        return self._slots.shelf(self.name)
