"""Agents of a simulation: production hosts, with ranks as processes of their own on the same nodes.

Production code runs: consensus, the leader's decisions, the machine of a host's ranks, the dialogue over a rank's pipe.
The network between agents, the pipes, the processes and the files of votes are simulated.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.errors import AsyncparError
from asyncpar.hosts.director import STOPPED_PATIENCE
from asyncpar.hosts.messages import JobOpened
from asyncpar.hosts.pipe_messages import decode_agent_line, encode_line
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.host_protocol import (
    RankGone,
    RankResumed,
    RankSilent,
    RankWrote,
    SlotEvent,
    StartRank,
    WriteToRank,
)
from asyncpar.launch.agents.job_record import ElasticMode, JobEnd, SubmittedJob, decode_end, encode_record
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.options import ProgramKind
from asyncpar.testing.simulation.cluster import AGENT, SimulatedCluster
from asyncpar.testing.simulation.disk import SimulatedDisk
from asyncpar.testing.simulation.group_network import SimulatedGroupNetwork, address_of
from asyncpar.testing.simulation.process import Health, SimulatedProcess
from asyncpar.testing.simulation.rank_pipe import PipeDirection, SimulatedRankPipe

RankMain = Callable[[SimulatedProcess, PipeWorlds], Coroutine[Any, Any, bool]]
"""Runs a rank in its process; returns whether it ended successfully."""

NOTICE_SECONDS: Final = 0.02
"""The most seconds until a host notices the end of a process."""
INSPECTION_SECONDS: Final = 0.1
"""The most seconds until a host notices that a process is stopped."""
AGAIN_SECONDS: Final = 1.0
"""Seconds until an agent that the others have gone on without joins again."""
LEAVE_SECONDS: Final = 30.0
"""Seconds that ranks have to leave at the end of a step; the default of ``asyncpar agent --grace``."""
_OPEN_SECONDS: Final = 0.1


def simulated_job(hosts: tuple[int, int], **settings: Any) -> SubmittedJob:
    """Return the record of a job with one rank on each of ``hosts``, the least and the most."""
    record: dict[str, Any] = {
        "version": "1",
        "name": "simulated",
        "mode": ElasticMode.RANKS,
        "program": "job.py",
        "arguments": (),
        "kind": ProgramKind.SCRIPT,
        "directory": "/",
        "environment": {},
        "slots": 1,
        "least_hosts": hosts[0],
        "most_hosts": hosts[1],
        "last_call": 5.0,
        "max_restarts": 10,
        "restart_window": 3600.0,
        "grace": 1.0,
        "timeout": 30.0,
        "silent_after": 10.0,
    }
    return SubmittedJob(**{**record, **settings})


@dataclass
class _RunningRank:
    """The process of a slot."""

    member: str
    process: SimulatedProcess
    pipe: SimulatedRankPipe


class SimulatedSlots:
    """Stand-in for ``SlotProcesses``: each rank is a process on the node of its agent."""

    def __init__(self, agents: SimulatedAgents, agent: SimulatedProcess, feed: Callable[[SlotEvent], None]) -> None:
        self._agents = agents
        self._agent = agent
        self._feed = feed
        self._running: dict[int, _RunningRank] = {}
        self._to_agent = PipeDirection(agents.cluster.network, agent)
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def pids(self) -> Mapping[int, int]:
        return {slot: running.process.number for slot, running in self._running.items()}

    def start(self, order: StartRank) -> None:
        agents, node = self._agents, self._agent.node
        assert node is not None
        process = agents.cluster.launch(node, lambda process: self._live(process, pipe))
        pipe = SimulatedRankPipe(
            agents.cluster.network,
            process,
            agents.dice,
            member=order.member,
            to_agent=self._to_agent,
            received=lambda message: self._feed(RankWrote(order.member, message)),
        )
        self._running[order.slot] = _RunningRank(order.member, process, pipe)
        self._settled.clear()
        agents.started(process, self)

    async def _live(self, process: SimulatedProcess, pipe: SimulatedRankPipe) -> None:
        is_well = await self._agents.main(process, PipeWorlds(pipe))
        self._to_agent.call(self.ended, process, 0 if is_well else 1)

    def write(self, order: WriteToRank) -> None:
        for running in self._running.values():
            if running.member == order.member:
                message = decode_agent_line(encode_line(order.message))
                running.pipe.to_rank.call(running.pipe.deliver, message)

    def signal(self, slot: int, number: int) -> None:
        running = self._running.get(slot)
        if running is not None and number in (signal.SIGKILL, signal.SIGTERM) and not running.process.is_dead:
            self._agents.cluster.kill(running.process)
            self._to_agent.call(self.ended, running.process, -number)

    def ended(self, process: SimulatedProcess, returncode: int) -> None:
        """Report the end of a process; runs in the agent's process."""
        slot = next((slot for slot, running in self._running.items() if running.process is process), None)
        if slot is None:
            return
        del self._running[slot]
        if not self._running:
            self._settled.set()
        now = asyncio.get_running_loop().time()
        end = RankEnd(
            generation=0,
            rank=slot,
            local_rank=slot,
            host=f"h{process.node}",
            pid=process.number,
            returncode=returncode,
            at=now,
        )
        self._feed(RankGone(slot, end))

    def inspect(self, process: SimulatedProcess) -> None:
        """Report that a process is stopped, or goes on; runs in the agent's process."""
        for slot, running in list(self._running.items()):
            if running.process is process and not process.is_dead:
                self._feed(RankSilent(slot, "is stopped") if process.health is Health.PAUSED else RankResumed(slot))

    @property
    def agent(self) -> SimulatedProcess:
        """The process of the agent."""
        return self._agent

    async def close(self) -> None:
        for slot in list(self._running):
            self.signal(slot, signal.SIGKILL)
        await self.settle()

    async def settle(self) -> None:
        await self._settled.wait()


class QuietHost:
    """A display that shows nothing, a reaper and a rendezvous that have nothing to do."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def lines(self, content: bytes) -> None:
        del content

    async def watch(self, _: Callable[[], None]) -> None:
        await asyncio.Event().wait()


class SimulatedAgents:
    """The agents of a job on all nodes of ``cluster``; ``main`` runs each of its ranks.

    Node 0 founds the group.  ``witnesses`` is the number of further nodes, which never fail, vote, and have no ranks.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        job: SubmittedJob,
        main: RankMain,
        *,
        seed: object,
        witnesses: int = 0,
    ) -> None:
        self.cluster = cluster
        self.job = job
        self.main = main
        self.dice = Random(f"{seed} lanes")
        self.end: JobEnd | None = None
        """The end of the job, once an agent knows."""
        self.on_rank: Callable[[SimulatedProcess], None] = lambda _: None
        """Called with each process of a rank that starts."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when the job is over for an agent."""
        cluster.helpers = witnesses
        spare = [SimulatedDisk(Random(f"{seed} disk of witness {number}")) for number in range(witnesses)]
        self._disks = [*cluster.disks, *spare]
        self._slots: dict[SimulatedProcess, SimulatedSlots] = {}
        """The slots of each rank's process."""
        self._hosts: dict[SimulatedProcess, HostAgent] = {}
        """The host agent of each agent's process."""
        self._over: dict[int, SimulatedProcess] = {}
        """By node, the agents that have nothing more to do: the job is over."""
        self._leader: int | None = None
        """The node whose agent led last."""
        self._awaited: set[int] = set()
        """Nodes whose agent is about to start again."""
        self.dead: set[int] = set()
        """Nodes of which a process has died from a fault."""

    # -- agents ----------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start the agents of all nodes."""
        for node in range(self.cluster.size + self.cluster.helpers):
            self.start(node)

    def start(self, node: int) -> None:
        """Start the agent of ``node``, unless it runs."""
        self._awaited.discard(node)
        if self.cluster.living(node, AGENT) is None:
            self.cluster.launch(node, self._live, role=AGENT)

    def is_over(self, node: int) -> bool:
        """Return whether the job is over for ``node``, or the node is off."""
        agent = self.cluster.living(node, AGENT)
        if agent is None:
            return node not in self._awaited
        return self._over.get(node) is agent

    def is_kept_out(self, node: int) -> bool:
        """Return whether the job is over for other nodes, and their leader and ``node`` are cut off from each other.

        Such a node cannot enter: the leader stays the leader as long as a quorum reaches it.
        """
        if self.end is None or self._leader in (None, node):
            return False
        return self.cluster.network.is_cut_off(node, self._leader)

    async def _live(self, process: SimulatedProcess) -> None:
        """Run the agent, which joins again whenever the others have gone on without it."""
        node = process.node
        assert node is not None
        nodes = self.cluster.size + self.cluster.helpers
        others = tuple(address_of(other) for other in range(nodes) if other != node)
        join = others if node else ()
        while True:
            try:
                join = await self._take_part(process, f"h{node}", join) or join
            except AsyncparError as error:
                self.cluster.print(node, f"ends: {error}")
                self._awaited.add(node)
                loop = self.cluster.loop
                loop.schedule(loop.outside, loop.now + AGAIN_SECONDS, self.start, node)
                self.cluster.kill(process)
                self.died(process)
            if process in self._hosts and self._hosts[process].is_leaving:
                self._gone(process)
            await asyncio.sleep(AGAIN_SECONDS)

    def leave(self, node: int) -> None:
        """Make the ranks of ``node`` leave, and its agent end, as SIGTERM does; an agent that is starting ends now."""
        process = self.cluster.living(node, AGENT)
        if process is not None:
            self.cluster.loop.schedule(process, self.cluster.loop.now, self._terminate, process)

    def _terminate(self, process: SimulatedProcess) -> None:
        agent = self._hosts.get(process)
        if agent is None:
            self._gone(process)
        else:
            agent.leave("got SIGTERM", grace=LEAVE_SECONDS)

    def _gone(self, process: SimulatedProcess) -> None:
        """Make an agent end by itself."""
        self.cluster.kill(process)
        self.died(process)
        self.on_over()

    async def _take_part(self, process: SimulatedProcess, name: str, join: tuple[str, ...]) -> tuple[str, ...]:
        node = process.node
        assert node is not None
        is_witness = node >= self.cluster.size
        service = WorldService(
            name=name,
            network=SimulatedGroupNetwork(self.cluster.network),
            join=join,
            votes=VoteFile(Path("votes"), job="agents", disk=self._disks[node]),
            is_witness=is_witness,
        )
        place = HostPlace(host=name, host_id=name, bind="", secret_file="", environment={}, is_witness=is_witness)
        quiet: Any = QuietHost()
        agent = HostAgent(
            service,
            place,
            rendezvous=quiet,
            display=quiet,
            reaper=quiet,
            on_line=lambda text: self.cluster.print(node, text),
            processes=self._slots_of(process),
        )
        self._hosts[process] = agent
        watching: asyncio.Task[None] | None = None
        try:
            await service.start()
            watching = asyncio.ensure_future(self._watch(process, service, agent))
            await agent.run()
            return tuple(host.address for host in (await service.status()).hosts if host.name != name)
        finally:
            if watching is not None:
                watching.cancel()
            await service.stop()

    async def _watch(self, process: SimulatedProcess, service: WorldService, agent: HostAgent) -> None:
        """Open the job, if no other agent has, and watch for its end."""
        content = encode_record(self.job)
        node = process.node
        assert node is not None
        await asyncio.sleep(max(0.0, -self.cluster.loop.now))
        while True:
            status = await service.status()
            if status.leader == f"h{node}":
                self._leader = node
            if status.job is None:
                service.report(JobOpened(number=1, terms=self.job.terms, record=content))
            elif status.closed is not None and agent.is_idle:
                self._over[node] = process
                self.on_over()
                self.end = decode_end(status.closed.record)
            await asyncio.sleep(_OPEN_SECONDS)

    def _slots_of(self, process: SimulatedProcess) -> Callable[..., Any]:
        return lambda _record, _place, *, feed, **_: SimulatedSlots(self, process, feed)

    # -- processes -------------------------------------------------------------------------------------------------

    def started(self, process: SimulatedProcess, slots: SimulatedSlots) -> None:
        """Record the process of a rank."""
        self._slots[process] = slots
        self.on_rank(process)

    def died(self, process: SimulatedProcess) -> None:
        """Handle the death of a process from a fault: ranks end with their agent, which notices their ends."""
        if process.node is not None:
            self.dead.add(process.node)
        slots = self._slots.pop(process, None)
        if slots is not None:
            when = self.cluster.loop.now + self.cluster.dice.random() * NOTICE_SECONDS
            self.cluster.loop.schedule(slots.agent, when, slots.ended, process, -int(signal.SIGKILL))
            return
        for rank, own in list(self._slots.items()):
            if own.agent is process and not rank.is_dead:
                self.cluster.kill(rank)

    def stopped(self, process: SimulatedProcess) -> None:
        """Handle the stop or the end of a process: the agent of a rank notices it, unless it is stopped, too."""
        slots = self._slots.get(process)
        if slots is not None:
            patience = STOPPED_PATIENCE if process.health is Health.PAUSED else 0.0
            when = self.cluster.loop.now + patience + self.cluster.dice.random() * INSPECTION_SECONDS
            self.cluster.loop.schedule(slots.agent, when, slots.inspect, process)
