"""Worlds of an elastic job in a simulation: what a member and its director say to each other over the network.

The director decides which world comes next (``ElasticDirector``, on a node of its own that never fails); members are
processes on nodes that do.  Either side repeats what is not acknowledged, numbers it, and takes it once.  Who is not
heard for ``BEAT_PATIENCE`` is held for lost; a process that dies on a living machine is reported by it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.elasticity.donors import Donor, SnapshotDescription, SnapshotShelf, StepUpdate
from asyncpar.elasticity.worlds import Membership, OnRevoked
from asyncpar.errors import LaunchError, PeerLost, StaleGeneration
from asyncpar.net.membership.lineage import Lineage, MemberReport
from asyncpar.net.membership.world_director import (
    AnnouncePending,
    DirectorCommand,
    ElasticDirector,
    Evict,
    FormWorld,
    RevokeWorld,
    StartWorld,
)
from asyncpar.testing.simulation.connector import SimConnector
from asyncpar.testing.simulation.network import SimulatedNetwork
from asyncpar.testing.simulation.process import SimulatedProcess

BEAT_SECONDS: Final = 0.5
BEAT_PATIENCE: Final = 4.0
"""Who is not heard for so long is held for lost."""

LEASE_SECONDS: Final = 2.5
"""For how long after a question a member may commit: less than ``BEAT_PATIENCE``, by more than clocks differ."""

LAST_CALL_SECONDS: Final = 5.0
"""How long the first world waits for those who are not there yet."""

_CALL_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 0.1
_DONOR_SECONDS: Final = 6.0


@dataclass(frozen=True, slots=True)
class PlaceInWorld:
    """A member's place in a new world, with the nodes of all."""

    formed: FormWorld
    rank: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberRequest:
    """A message of a member to the director."""

    name: str
    node: int
    number: int
    verb: str
    content: Any = None


@dataclass
class _Peer:
    """A member, as the director knows it."""

    node: int
    heard: float
    taken: int = -1
    answer: Any = None
    outbox: asyncio.Queue[object] = field(default_factory=asyncio.Queue)
    is_gone: bool = False


class DirectorService:
    """Carries an ``ElasticDirector``: takes requests of members, sends them what it decides."""

    def __init__(self, network: SimulatedNetwork, director: ElasticDirector) -> None:
        self.director = director
        self.formed: list[FormWorld] = []
        """All worlds so far."""
        self.placed: set[str] = set()
        """Who has been a member of a world that has started."""
        self._network = network
        self._loop = network.loop
        self._peers: dict[str, _Peer] = {}
        self._waiting: dict[str, Lineage] = {}
        """Who waits for the first world."""
        self._first = 0.0
        self._pumps: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until cancelled."""
        self._network.serve("director", self._take)
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = self._loop.time()
            for name, peer in list(self._peers.items()):
                if not peer.is_gone and now - peer.heard > BEAT_PATIENCE:
                    self._hold_for_lost(name, peer, f"was not heard for {BEAT_PATIENCE:g} s")
            if self._waiting and not self.director.has_begun and now - self._first > LAST_CALL_SECONDS:
                self._begin_with_fewer(now)
            self._obey(self.director.tick(now))

    def died(self, name: str, how: str) -> None:
        """Tell the director of a process whose end the machine of its member has seen."""
        peer = self._peers.get(name)
        if peer is not None and not peer.is_gone:
            peer.is_gone = True
            self._waiting.pop(name, None)
            self._obey(self.director.lost(name, how, self._loop.time()))

    async def _take(self, request: MemberRequest) -> Any:
        now = self._loop.time()
        peer = self._peers.setdefault(request.name, _Peer(request.node, now))
        peer.heard = now
        if request.number > peer.taken:
            peer.taken, peer.answer = request.number, self._do(request, peer, now)
        return peer.answer

    def _do(self, request: MemberRequest, peer: _Peer, now: float) -> Any:
        name, content, director = request.name, request.content, self.director
        if peer.is_gone and request.verb in ("arrive", "report"):
            peer.outbox.put_nowait(Evict(name, "it was held for lost, and the others went on without it"))
            self._pump(name, peer)
            return None
        match request.verb:
            case "arrive":
                if not director.has_begun:
                    self._first = self._first if self._waiting else now
                    self._waiting[name] = content
                self._obey(director.arrive(name, content, now))
            case "progress":
                self._obey(director.progress(name, content, now))
            case "report":
                self._obey(director.report(name, content, now))
            case "leave":
                peer.is_gone = True
                self._obey(director.lost(name, "left", now))
            case "withdraw":
                self._waiting.pop(name, None)
                self._obey(director.withdraw(name, now))
                return director.generation
            case "ready":
                self._obey(director.ready(name, content))
            case "lease":
                return 0.0 if peer.is_gone else LEASE_SECONDS
            case "donors":
                found = [(member, self._peers[member].node) for member in director.members]
                return (director.has_begun, [pair for pair in found if not self._peers[pair[0]].is_gone])
        return None

    def _begin_with_fewer(self, now: float) -> None:
        """Make the first world of those who are there: the last call is over."""
        self.director = ElasticDirector(len(self._waiting))
        for name, lineage in self._waiting.items():
            self._obey(self.director.arrive(name, lineage, now))

    def _hold_for_lost(self, name: str, peer: _Peer, why: str) -> None:
        self._send(name, Evict(name, why))
        peer.is_gone = True
        self._waiting.pop(name, None)
        self._obey(self.director.lost(name, why, self._loop.time()))

    def _obey(self, commands: Iterable[DirectorCommand]) -> None:
        for command in commands:
            match command:
                case StartWorld(_, members):
                    self.placed.update(members)
                    for name in members:
                        self._send(name, command)
                case RevokeWorld(_, members, _) | AnnouncePending(_, members):
                    for name in members:
                        self._send(name, command)
                case Evict(name, _):
                    self._send(name, command)
                case FormWorld():
                    self.formed.append(command)
                    nodes = tuple(self._peers[name].node for name in command.members)
                    for rank, name in enumerate(command.members):
                        self._send(name, PlaceInWorld(command, rank, nodes))

    def _send(self, name: str, command: object) -> None:
        peer = self._peers[name]
        peer.outbox.put_nowait(command)
        self._pump(name, peer)

    def _pump(self, name: str, peer: _Peer) -> None:
        if name not in self._pumps:
            self._pumps[name] = asyncio.create_task(self._deliver(name, peer), name=f"to {name}")

    async def _deliver(self, name: str, peer: _Peer) -> None:
        """Send a member what is for it, in order, each again until it is acknowledged."""
        number = 0
        while True:
            command = await peer.outbox.get()
            await _call_until_answered(self._network, peer.node, f"member {name}", (number, command))
            number += 1


class SimulatedWorldSource:
    """The worlds of one process.  See ``asyncpar.elasticity.worlds.WorldSource``."""

    def __init__(
        self, network: SimulatedNetwork, process: SimulatedProcess, dice: Random, *, name: str, director_node: int
    ) -> None:
        self.name = name
        self._network = network
        self._process = process
        self._dice = dice
        self._director_node = director_node
        self._outbox: asyncio.Queue[tuple[MemberRequest, asyncio.Future[Any]]] = asyncio.Queue()
        self._numbers = 0
        self._taken = -1
        self._pending = -1
        self._lease = CommitLease(self._ask_lease)
        self._started = -1
        self._withdrawn = -1
        """Worlds up to this generation are not for the present state."""
        self._shelf: SnapshotShelf | None = None
        self._coming: asyncio.Future[Membership | None] | None = None
        self._ended: BaseException | None = None
        self._callbacks: list[OnRevoked] = []
        self._news = asyncio.Event()

    async def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Return what ``main`` returns; the worlds of this process are served meanwhile."""
        self._network.serve(f"member {self.name}", self._take)
        self._network.serve(f"shelf {self.name}", self._give)
        helpers = [asyncio.create_task(self._deliver()), asyncio.create_task(self._beat())]
        try:
            return await main
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
            self._network.withdraw(f"member {self.name}")
            self._network.withdraw(f"shelf {self.name}")

    # -- WorldSource -----------------------------------------------------------------------------------------------

    async def donors(self) -> Sequence[Donor]:
        has_begun, found = await self._ask("donors")
        if has_begun and not found:
            raise LaunchError("the job is over: all its members have left")
        return [SimulatedDonor(self._network, name, node) for name, node in found]

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:  # noqa: ARG002
        self._shelf = shelf
        membership = await self._come("arrive", lineage)
        assert membership is not None
        return membership

    def progress(self, lineage: Lineage) -> None:
        self._tell("progress", lineage)

    async def withdraw(self) -> None:
        self._withdrawn = await self._ask("withdraw")

    async def next_world(self, report: MemberReport) -> Membership | None:
        return await self._come("report", report)

    def refused(self, why: str) -> None:
        """Do nothing: it ends, and nobody starts it again."""

    def on_revoked(self, callback: OnRevoked) -> None:
        self._callbacks.append(callback)

    def has_pending(self, generation: int) -> bool:
        return self._pending == generation

    async def hold_lease(self) -> None:
        await self._lease.hold()

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:  # noqa: ARG002
        await self._ask("leave")

    # -- what is said ----------------------------------------------------------------------------------------------

    async def _come(self, verb: str, content: Any) -> Membership | None:
        coming = self._coming = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            raise self._ended
        self._tell(verb, content)
        membership: Membership | None = await coming
        return membership

    def _tell(self, verb: str, content: Any = None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        node = self._process.node
        assert node is not None
        self._outbox.put_nowait((MemberRequest(self.name, node, self._numbers, verb, content), answer))
        self._numbers += 1
        return answer

    async def _ask(self, verb: str, content: Any = None) -> Any:
        return await self._tell(verb, content)

    def _ask_lease(self) -> None:
        self._tell("lease").add_done_callback(lambda answer: self._lease.grant(answer.result()))

    async def _deliver(self) -> None:
        while True:
            request, answer = await self._outbox.get()
            value = await _call_until_answered(self._network, self._director_node, "director", request)
            if not answer.done():
                answer.set_result(value)

    async def _beat(self) -> None:
        node = self._process.node
        assert node is not None
        while True:
            self._network.post(self._director_node, "director", MemberRequest(self.name, node, -1, "beat"))
            await asyncio.sleep(BEAT_SECONDS)

    # -- what is heard ---------------------------------------------------------------------------------------------

    async def _take(self, numbered: tuple[int, object]) -> None:
        number, command = numbered
        if number <= self._taken:
            return
        self._taken = number
        match command:
            case RevokeWorld(generation, _, why, is_planned):
                self._revoke(generation, None if is_planned else PeerLost(why, cause=why))
            case AnnouncePending(generation, _):
                self._pending = generation
            case Evict(_, why):
                self._evict(why)
            case PlaceInWorld():
                self._welcome(command)
            case StartWorld(generation, _):
                self._started = generation
                self._news.set()

    def _revoke(self, generation: int, why: BaseException | None) -> None:
        for callback in list(self._callbacks):
            callback(generation, why)

    def _evict(self, why: str) -> None:
        coming = self._coming
        if why == "drained":
            if coming is not None and not coming.done():
                coming.set_result(None)
            return
        self._ended = StaleGeneration(why)
        self._lease.end(self._ended)
        if coming is not None and not coming.done():
            coming.set_exception(self._ended)
        self._revoke(1 << 62, self._ended)

    def _welcome(self, welcome: PlaceInWorld) -> None:
        formed, rank = welcome.formed, welcome.rank
        names = [f"host-{node}" for node in welcome.nodes]
        members = tuple(
            Member(rank=place, host=name, host_id=name, address=f"{name}:1") for place, name in enumerate(names)
        )
        world = World(members=members, generation=formed.generation, job="simulated")

        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            connector = SimConnector(self._network, self._process, self._dice, node_of=welcome.nodes.__getitem__)
            connector.serve()
            stack.callback(connector.leave)
            await self._meet(formed.generation)
            return WorldBootstrap(world=world, rank=rank, connector=connector, join=connector.join)

        if self._coming is not None and not self._coming.done() and formed.generation > self._withdrawn:
            self._coming.set_result(
                Membership(
                    generation=formed.generation,
                    rank=rank,
                    size=len(formed.members),
                    attach=attach,
                    lineage=formed.lineage,
                    decision=formed.decision,
                    change=formed.change,
                )
            )

    async def _meet(self, generation: int) -> None:
        """Wait until all members of a world can be connected to."""
        self._tell("ready", generation)
        while self._started < generation:
            self._news.clear()
            await self._news.wait()

    async def _give(self, request: tuple[str, tuple[Any, ...]]) -> Any:
        """Give a newcomer something from the shelf; what travels is a copy."""
        verb, arguments = request
        if self._shelf is None:
            raise PeerLost(f"{self.name} has no state yet", cause="no state")
        given = await getattr(self._shelf, verb)(*arguments)
        if isinstance(given, memoryview):
            return bytes(given)
        return given.copied() if isinstance(given, StepUpdate) else given


class SimulatedDonor:
    """A member on another node that newcomers get the state from."""

    def __init__(self, network: SimulatedNetwork, name: str, node: int) -> None:
        self.name = name
        self._network = network
        self._node = node

    async def position(self) -> int:
        return int(await self._ask("position"))

    async def pin(self, step: int) -> SnapshotDescription:
        found = await self._ask("pin", step)
        assert isinstance(found, SnapshotDescription)
        return found

    async def block(self, pin: int, name: str, number: int) -> bytes | memoryview:
        return bytes(await self._ask("block", pin, name, number))

    async def update(self, pin: int, number: int) -> StepUpdate:
        found = await self._ask("update", pin, number)
        assert isinstance(found, StepUpdate)
        return found

    async def lineage(self, pin: int, step: int) -> Lineage:
        found = await self._ask("lineage", pin, step)
        assert isinstance(found, Lineage)
        return found

    async def unpin(self, pin: int) -> None:
        await self._ask("unpin", pin)

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        try:
            await self._network.reach(self._node, f"shelf {self.name}", timeout=_DONOR_SECONDS)
            return await self._network.call(
                self._node, f"shelf {self.name}", (verb, arguments), timeout=10 * _DONOR_SECONDS
            )
        except OSError as error:
            raise PeerLost(f"{self.name} does not answer: {error}", cause=str(error)) from error


async def _call_until_answered(network: SimulatedNetwork, node: int, service: str, request: object) -> Any:
    """Call a service, again and again until it answers, and return its answer."""
    while True:
        try:
            return await network.call(node, service, request, timeout=_CALL_SECONDS)
        except OSError:
            await asyncio.sleep(_AGAIN_SECONDS)
