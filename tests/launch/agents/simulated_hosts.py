"""Hosts of a simulation: production agents (``WorldService``, ``HostAgent``, ``ElasticRanks``) with ranks of straw.

A rank commits a step when all ranks of its world have voted for it, and it holds its lease (``CommitLease``); its state
is the chain of the generations in which its steps were prepared.  Whatever is decided, heard or committed is noted for
the checks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.elasticity.interruption import Interruption
from asyncpar.errors import AsyncparError, LaunchError
from asyncpar.hosts import consensus_messages as consensus
from asyncpar.hosts.consensus_messages import Entry, Term
from asyncpar.hosts.lineage import Lineage, MemberReport
from asyncpar.hosts.messages import HostCommand, JobOpened
from asyncpar.hosts.pipe_messages import (
    AgentMessage,
    AllServed,
    ChangeWaits,
    DonorsFound,
    DonorsWanted,
    Drained,
    JobOver,
    JoinWorld,
    LeaseGranted,
    LeaseWanted,
    LinksServed,
    PipeMessage,
    RankMessage,
    StateReached,
    Withdraw,
    Withdrawn,
    WorldFormed,
    WorldOver,
    WorldReport,
)
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.total_loss import OnTotalLoss
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.host_protocol import RankGone, RankPlace, RankWrote, SlotEvent, StartRank, WriteToRank
from asyncpar.launch.agents.job_record import ElasticMode, SubmittedJob, encode_record
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.options import ProgramKind
from asyncpar.testing.simulation import note
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.group_network import SimulatedGroupNetwork, address_of, running
from asyncpar.testing.simulation.network import SimulatedNetwork
from asyncpar.testing.simulation.process import SimulatedProcess

Answer = TypeVar("Answer", bound=PipeMessage)

START: Final = Lineage(0, b"start")
STEP_SECONDS: Final = 0.05
AGAIN_SECONDS: Final = 0.2
LOST_SECONDS: Final = 5.0
"""After so many seconds a rank that has not voted is declared lost."""
FETCH_SECONDS: Final = 1.0
RESTART_SECONDS: Final = 1.0


# What is noted.


@dataclass(frozen=True)
class Decided:
    entry: Entry


@dataclass(frozen=True)
class Leads:
    term: Term


@dataclass(frozen=True)
class Received:
    service: int
    command: HostCommand


@dataclass(frozen=True)
class Committed:
    member: str
    generation: int
    lineage: Lineage
    is_forward: bool


@dataclass(frozen=True)
class Started:
    """A process of a rank has started."""

    member: str


@dataclass(frozen=True)
class EndedByChance:
    """A rank, or a whole host, that nothing was planned for has died."""


@dataclass(frozen=True)
class Failed:
    why: str


class Died(BaseException):
    """Unwinds what a process was doing when it died."""


class DyingDisk:
    """A disk whose process dies now and then before, or right after, it has stored something."""

    def __init__(self, cluster: SimulatedCluster, process: SimulatedProcess, chance: Callable[[], float]) -> None:
        assert process.node is not None
        self._disk = cluster.disks[process.node]
        self._cluster, self._process, self._chance = cluster, process, chance

    def read(self, name: str) -> bytes:
        return self._disk.read(name)

    def replace(self, name: str, data: bytes) -> None:
        chance = self._chance()
        place = self._cluster.dice.random() / chance if chance else 2.0
        if 0.5 <= place < 1.0:
            self._die()
        self._disk.replace(name, data)
        if place < 0.5:
            self._die()

    def _die(self) -> None:
        node, cluster = self._process.node, self._cluster
        assert node is not None
        _note(EndedByChance())
        cluster.kill(self._process)
        cluster.loop.schedule(cluster.loop.outside, cluster.loop.now + RESTART_SECONDS, cluster.on_restart, node)
        raise Died


class NotedService(WorldService):
    """The production service; notes what it decides and hears."""

    number = 0

    def _learn(self, entry: Entry) -> None:
        _note(Decided(entry))
        super()._learn(entry)

    def _obey(self, command: consensus.Command) -> None:
        if isinstance(command, consensus.BeginLeading):
            _note(Leads(command.term))
        super()._obey(command)

    async def _commands(self) -> AsyncIterator[HostCommand]:
        async for command in super()._commands():
            _note(Received(self.number, command))
            yield command

    def end(self) -> None:
        """Do what the end of a process does."""
        self._fail(LaunchError("the process has ended"))
        for timer in (self._clock, self._ticking):
            if timer is not None:
                timer.cancel()
        for peer in self._peers.values():
            asyncio.ensure_future(peer.close())  # noqa: RUF006  # the loop of the simulation keeps it


def _note(content: object) -> None:
    if not running().is_dead:
        note(content)


class StrawRank:
    """One rank; ``report`` goes to its agent, ``receive`` comes from it."""

    def __init__(
        self,
        network: SimulatedNetwork,
        member: str,
        report: Callable[[RankMessage], None],
        may_die: Callable[[], bool],
    ) -> None:
        self.member = member
        self._network = network
        self._may_die = may_die
        self._report = report
        self._lineage = START
        self._has_state = self._is_gone = False
        self._prepared: Lineage | None = None
        self._lease = CommitLease(lambda: report(LeaseWanted()))
        self._holding: Interruption | None = None
        self._inbox: asyncio.Queue[AgentMessage] = asyncio.Queue()
        self._revoked = -1
        self._pending = -1
        self._news = asyncio.Event()
        self._votes: dict[tuple[int, int], dict[int, bool]] = {}
        self._own: dict[tuple[int, int], tuple[str, ...]] = {}

    def receive(self, message: AgentMessage) -> None:
        match message:
            case WorldOver(generation):
                self._revoked = max(self._revoked, generation)
                if self._holding is not None:
                    self._holding.interrupt()
            case LeaseGranted(seconds):
                self._lease.grant(seconds)
            case ChangeWaits(generation):
                self._pending = max(self._pending, generation)
            case JobOver():
                self._revoked = 1 << 60
            case _:
                self._inbox.put_nowait(message)
        self._news.set()

    async def run(self) -> None:
        self._network.serve(f"state {self.member}", self._give_state)
        self._network.serve(f"vote {self.member}", self._take_vote)
        try:
            message = await self._join()
            while isinstance(message, WorldFormed):
                message = await self._live(message)
        finally:
            self._is_gone = True

    # -- newcomers

    async def _join(self) -> WorldFormed | Drained:
        while True:
            self._report(DonorsWanted())
            donors = (await self._next(DonorsFound)).donors
            if not donors or await self._heal(donors):
                break
            await asyncio.sleep(0.1)
            await self._withdraw()
        node = running().node
        self._has_state = True
        self._report(JoinWorld(self._lineage, f"{node}"))
        while True:
            try:
                async with asyncio.timeout(0.2):
                    return await self._next(WorldFormed, Drained)
            except TimeoutError:
                before = self._lineage
                if donors and not await self._fetch_any(donors):
                    await self._withdraw()
                    return await self._join()
                if self._lineage != before and self._inbox.empty():
                    self._report(StateReached(self._lineage))

    async def _withdraw(self) -> None:
        self._has_state = False
        self._report(Withdraw())
        await self._next(Withdrawn)

    async def _heal(self, donors: Sequence[tuple[str, str]]) -> bool:
        """Fetch the state that donors have when they have ended another step; False if none is left."""
        if not await self._fetch_any(donors):
            return False
        first = self._lineage.step
        while self._lineage.step <= first:
            await self._sleep(0.1)
            if not await self._fetch_any(donors):
                return False
        return True

    async def _fetch_any(self, donors: Sequence[tuple[str, str]]) -> bool:
        return any(await asyncio.gather(*(self._fetch(donor) for donor in donors)))

    async def _fetch(self, donor: tuple[str, str]) -> bool:
        name, node = donor
        try:
            found = await self._network.call(int(node), f"state {name}", self.member, timeout=FETCH_SECONDS)
        except OSError:
            return False
        lineage = msgspec.convert(found, Lineage | None)
        if lineage is None:  # it has none itself, or is gone
            return False
        if lineage.step >= self._lineage.step:
            self._lineage = lineage
        return True

    async def _give_state(self, _: str) -> Any:
        return msgspec.to_builtins(self._lineage if self._has_state and not self._is_gone else None)

    async def _next(self, *kinds: type[Answer]) -> Answer:
        while True:
            message = await self._inbox.get()
            if isinstance(message, kinds):
                return message

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._may_die():
            await self._die()

    async def _die(self) -> None:
        """End as a process that crashes, while its agent lives."""
        task = asyncio.current_task()
        assert task is not None
        _note(EndedByChance())
        task.cancel()
        await asyncio.sleep(0)

    # -- worlds

    async def _live(self, world: WorldFormed) -> WorldFormed | Drained:
        """Be in a world until it is over; return what comes next."""
        generation, rank = world.generation, world.rank
        await self._begin(generation, world.lineage)
        node = running().node
        self._report(LinksServed(generation, f"{node} {self.member}"))
        suspects: list[tuple[int, str]] = []
        members: list[str] = []
        while generation > self._revoked and not members:
            members = await self._members(generation)
        while members and generation > self._revoked:
            await self._sleep(STEP_SECONDS * (0.5 + rank / 8))
            if generation <= self._revoked:
                break
            missing = await self._step(generation, rank, members)
            if missing is None:
                break
            suspects += [(one, "does not answer") for one in missing]
            if missing or any(self._votes[generation, self._lineage.step - 1].values()):
                break
        report = MemberReport(
            generation=generation, lineage=self._lineage, prepared=self._prepared, suspects=tuple(suspects)
        )
        self._report(WorldReport(report))
        return await self._next(WorldFormed, Drained)

    async def _begin(self, generation: int, lineage: Lineage) -> None:
        prepared, self._prepared = self._prepared, None
        if self._lineage.step < lineage.step:
            if prepared != lineage:
                _note(Failed(f"{self.member} cannot come to {lineage} of generation {generation}"))
            await self._lease.hold()
            self._commit(generation, lineage, is_forward=True)
        elif self._lineage != lineage:
            _note(Failed(f"{self.member} has {self._lineage}, generation {generation} goes on from {lineage}"))

    async def _members(self, generation: int) -> list[str]:
        if self._inbox.empty():
            self._news.clear()
            await self._news.wait()
        if not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, AllServed) and message.generation == generation:
                return list(message.addresses)
        return []

    async def _step(self, generation: int, rank: int, members: list[str]) -> list[int] | None:
        """Vote, and commit when all have; return who has not voted, None if the world is over."""
        loop = asyncio.get_running_loop()
        self._prepared = self._lineage.child(str(generation).encode())
        key = generation, self._lineage.step
        votes = self._votes.setdefault(key, {})
        votes[rank] = self._pending == generation
        self._own[key] = tuple(members)
        self._send(key, rank, range(len(members)))
        if self._may_die():
            await self._die()
        began = sent = loop.time()
        while len(votes) < len(members):
            if generation <= self._revoked:
                return None
            if loop.time() - began > LOST_SECONDS:
                return [one for one in range(len(members)) if one not in votes]
            if loop.time() - sent > AGAIN_SECONDS:
                sent = loop.time()
                self._send(key, rank, [one for one in range(len(members)) if one not in votes])
            self._news.clear()
            try:
                async with asyncio.timeout(AGAIN_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass
        if generation <= self._revoked or not await self._may_commit():
            return None
        self._commit(generation, self._prepared, is_forward=False)
        self._prepared = None
        return []

    async def _may_commit(self) -> bool:
        """Return when this rank holds its lease, as ``ElasticStep`` does; False: its world is over meanwhile."""
        holding = self._holding = Interruption()
        holding.begin()
        error: BaseException | None = None
        try:
            await self._lease.hold()
        except asyncio.CancelledError as cancelled:
            error = cancelled
        self._holding = None
        was_interrupted = holding.end()
        if error is not None and not was_interrupted:
            raise error
        return not was_interrupted

    def _send(self, key: tuple[int, int], rank: int, targets: Any) -> None:
        for target in targets:
            node, member = self._own[key][target].split(" ")
            if member != self.member:
                self._network.post(int(node), f"vote {member}", (*key, rank, self._votes[key][rank]))

    async def _take_vote(self, vote: tuple[int, int, int, bool]) -> None:
        if self._is_gone:
            return
        generation, step, rank, is_pending = vote
        key = generation, step
        self._votes.setdefault(key, {})[rank] = is_pending
        if step < self._lineage.step and key in self._own and self._own[key]:
            mine = [one for one, place in enumerate(self._own[key]) if place.endswith(self.member)]
            self._send(key, mine[0], [rank])  # it has missed ours
        self._news.set()

    def _commit(self, generation: int, lineage: Lineage, *, is_forward: bool) -> None:
        self._lineage = lineage
        _note(Committed(self.member, generation, lineage, is_forward))


class StrawProcesses:
    """Stand-in for ``SlotProcesses``: ranks are tasks."""

    network: SimulatedNetwork
    may_die: Callable[[], bool]

    def __init__(
        self,
        record: SubmittedJob,
        place: HostPlace,
        *,
        display: Any,
        reaper: Any,
        feed: Callable[[SlotEvent], None],
        watch: Any,
        remains: Any,
        on_output: Any,
        on_broken_output: Any,
    ) -> None:
        del record, display, reaper, watch, remains, on_output, on_broken_output
        self._host = place.host
        self._feed = feed
        self._running: dict[int, tuple[StrawRank, asyncio.Task[None]]] = {}
        self.pids: dict[int, int] = {}

    def start(self, order: StartRank) -> None:
        loop = asyncio.get_running_loop()

        def report(message: RankMessage) -> None:
            loop.call_soon(self._feed, RankWrote(order.member, message))

        _note(Started(order.member))
        rank = StrawRank(self.network, order.member, report, self.may_die)
        task = asyncio.ensure_future(rank.run())
        self._running[order.slot] = rank, task
        task.add_done_callback(lambda _: loop.call_soon(self._gone, order.slot, task))

    def signal(self, slot: int, number: int) -> None:
        if slot in self._running and number in (signal.SIGKILL, signal.SIGTERM):
            self._running[slot][1].cancel()

    def kill(self, slot: int) -> None:
        self.signal(slot, signal.SIGKILL)

    def write(self, order: WriteToRank) -> None:
        for rank, _ in self._running.values():
            if rank.member == order.member:
                rank.receive(order.message)

    async def close(self) -> None:
        for _, task in list(self._running.values()):
            task.cancel()
        await self.settle()

    async def settle(self) -> None:
        if self._running:
            await asyncio.wait({task for _, task in self._running.values()})

    def _gone(self, slot: int, task: asyncio.Task[None]) -> None:
        rank, found = self._running.get(slot, (None, None))
        if found is not task:
            return
        del self._running[slot]
        if not task.cancelled() and (error := task.exception()) is not None:
            _note(Failed(f"{rank and rank.member}: {error!r}"))
        code = -signal.SIGKILL if task.cancelled() else 0
        now = asyncio.get_running_loop().time()
        end = RankEnd(generation=0, rank=slot, local_rank=slot, host=self._host, pid=1, returncode=code, at=now)
        self._feed(RankGone(slot, end))


@dataclass(frozen=True)
class RanHere:
    """A rank of a job that starts again with every world has started, and has ended with ``code`` (None: it runs)."""

    place: RankPlace
    code: int | None = None


class RestartedProcesses(StrawProcesses):
    """Stand-in for the processes of a job that starts again with every world.

    A rank runs until it is ended, crashes, or finds that another one of its world has: then it says so, or hangs.
    """

    failed: set[tuple[int, int]]
    """Generation and rank of those that have crashed, or are gone with their hosts."""

    def start(self, order: StartRank) -> None:
        assert order.place is not None
        task = asyncio.ensure_future(self._run(order.place))
        self._places[order.slot] = order.place
        self._tasks[order.slot] = task
        _note(RanHere(order.place))
        loop = asyncio.get_running_loop()
        task.add_done_callback(lambda _: loop.call_soon(self._ended, order.slot, task))

    def __init__(self, *given: Any, **others: Any) -> None:
        super().__init__(*given, **others)
        self._places: dict[int, RankPlace] = {}
        self._tasks: dict[int, asyncio.Task[int]] = {}
        self._signals: dict[int, int] = {}

    async def _run(self, place: RankPlace) -> int:
        """Return the code of the process: 2, with a report, if it has lost another rank."""
        while True:
            await asyncio.sleep(0.2)
            if self.may_die():
                self.failed.add((place.generation, place.rank))
                return 3
            lost = [rank for generation, rank in self.failed if generation == place.generation]
            if lost and (place.rank + place.generation) % 2:
                return 2

    def signal(self, slot: int, number: int) -> None:
        if slot in self._tasks and number in (signal.SIGKILL, signal.SIGTERM):
            self._signals.setdefault(slot, number)
            self._tasks[slot].cancel()

    def notify_loss(self, loss: Loss) -> None:
        del loss

    def notify_condition(self, rank: int, how: str) -> None:
        del rank, how

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await self.settle()

    async def settle(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()))

    def _ended(self, slot: int, task: asyncio.Task[int]) -> None:
        place = self._places.pop(slot)
        del self._tasks[slot]
        number = self._signals.pop(slot, signal.SIGKILL)
        code = -number if task.cancelled() else task.result()
        _note(RanHere(place, code))
        blamed = min((rank for generation, rank in self.failed if generation == place.generation), default=None)
        report = FailureReport(type_name="PeerLost", message="", traceback="", is_peer_error=True, blames=blamed)
        end = RankEnd(
            generation=place.generation,
            rank=place.rank,
            local_rank=slot,
            host=self._host,
            pid=1,
            returncode=code,
            at=asyncio.get_running_loop().time(),
            report=report if code == 2 else None,
        )
        self._feed(RankGone(slot, end))


class _Quiet:
    """A display that shows nothing, a reaper that has nothing to do, and a rendezvous that nobody comes to."""

    def open(self, **_: Any) -> None: ...
    def exited(self, **_: Any) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def lines(self, content: bytes, *, is_output: bool = False) -> None:
        del content

    async def watch(self, _: Callable[[], None]) -> None:
        await asyncio.Event().wait()


def record(hosts: tuple[int, int], mode: ElasticMode = ElasticMode.RANKS) -> SubmittedJob:
    return SubmittedJob(
        version="1",
        name="job",
        mode=mode,
        program="job.py",
        arguments=(),
        kind=ProgramKind.SCRIPT,
        directory="/",
        environment={},
        slots=1,
        least_hosts=hosts[0],
        most_hosts=hosts[1],
        last_call=1.0,
        max_restarts=10_000,
        restart_window=1.0,
        grace=1.0,
        timeout=30.0 if mode is ElasticMode.RANKS else 1e6,
        silent_after=10.0,
        on_total_loss=OnTotalLoss.RESTART,  # histories go on
    )


class SimulatedHosts:
    """The programs of the nodes of ``cluster``; node 0 founds the group, ``witness`` has no ranks."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        *,
        hosts: tuple[int, int],
        idle: tuple[int, ...] = (),
        death_chance: float = 0.0,
        rank_death_chance: float = 0.0,
        mode: ElasticMode = ElasticMode.RANKS,
    ) -> None:
        self.cluster = cluster
        self.job = record(hosts, mode)
        self._idle = idle
        self._death_chance = death_chance
        self._rank_death_chance = rank_death_chance
        self._services = 0

    def calm(self) -> None:
        """Let nobody die by itself any more."""
        self._death_chance = self._rank_death_chance = 0.0

    def rank_may_die(self) -> bool:
        """Draw whether a rank crashes now."""
        return bool(self._rank_death_chance) and self.cluster.dice.random() < self._rank_death_chance

    def start(self, node: int) -> None:
        if self.cluster.living(node) is None:
            self.cluster.launch(node, self._live)

    async def _live(self, process: SimulatedProcess) -> None:
        """Do what the process of an agent does, started again after a while whenever it ends."""
        node = process.node
        assert node is not None
        others = tuple(address_of(other) for other in range(self.cluster.size) if other != node)
        join = others if node else ()
        while True:
            try:
                join = await self._take_part(process, f"h{node}", join) or join
            except AsyncparError:
                self.cluster.kill(process)
                loop = self.cluster.loop
                loop.schedule(loop.outside, loop.now + RESTART_SECONDS, self.cluster.on_restart, node)
            await asyncio.sleep(RESTART_SECONDS)

    async def _take_part(self, process: SimulatedProcess, name: str, join: tuple[str, ...]) -> tuple[str, ...]:
        disk = DyingDisk(self.cluster, process, lambda: self._death_chance)
        network = SimulatedGroupNetwork(self.cluster.network)
        votes = VoteFile(Path("votes"), job="agents", disk=disk)
        is_witness = process.node in self._idle
        service = NotedService(name=name, network=network, join=join, votes=votes, is_witness=is_witness)
        self._services += 1
        service.number = self._services
        place = HostPlace(host=name, host_id=name, bind="", secret_file="", environment={}, is_witness=is_witness)
        quiet: Any = _Quiet()
        straw: Any = StrawProcesses if self.job.mode is ElasticMode.RANKS else RestartedProcesses
        agent = HostAgent(service, place, rendezvous=quiet, display=quiet, reaper=quiet, processes=straw)
        agent.address = f"10.0.0.{process.node}:1"
        opening: asyncio.Task[None] | None = None
        try:
            await service.start()
            opening = asyncio.ensure_future(self._open_job(service))
            await agent.run()
            others = [host.address for host in (await service.status()).hosts if host.name != name]
            return tuple(others)
        finally:
            if opening is not None:
                opening.cancel()
            service.end()

    async def _open_job(self, service: WorldService) -> None:
        content = encode_record(self.job)
        while (await service.status()).job is None:
            await asyncio.sleep(1.0)
            service.report(JobOpened(number=1, terms=self.job.terms, record=content))
