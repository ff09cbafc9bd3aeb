"""Elastic worlds in one process, for tests: members are tasks, which can be killed, drained, and come later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeAlias

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.elasticity.donors import Donor, SnapshotDescription, SnapshotShelf, StepUpdate
from asyncpar.elasticity.worlds import Membership, OnRevoked, WorldSource
from asyncpar.errors import LaunchError, PeerLost, StaleGeneration, UsageError
from asyncpar.net.membership.lineage import Lineage, MemberReport
from asyncpar.net.membership.world_director import (
    AnnouncePending,
    DirectorCommand,
    ElasticDirector,
    Evict,
    FormWorld,
    RevokeWorld,
    rotated,
)
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.links import Links

Main: TypeAlias = "Callable[[WorldSource], Coroutine[Any, Any, Any]]"

_TICK = 0.5


class ElasticWorlds:
    """Runs members of an elastic job as tasks: ``async with ElasticWorlds(4) as worlds``.

    ``size`` members make the first world.  ``start`` runs ``main(source)``, which is ``ap.elastic(source=source)`` and
    what follows; members that are started later are newcomers.  At the end, members that run are killed.
    """

    def __init__(self, size: int) -> None:
        self.director = ElasticDirector(size)
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        """What members come to, by name."""
        self.worlds: list[FormWorld] = []
        """All worlds so far."""
        self._sources: dict[str, LocalWorldSource] = {}
        self._fabric = InprocFabric()
        self._taking: set[str] = set()
        """Who has not taken the last world yet."""
        self._all_take = asyncio.Event()
        self._asked = 0
        self._ticking: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for name in list(self._sources):
            self.kill(name)
        if self.tasks:
            await asyncio.wait(self.tasks.values())

    def start(self, name: str, main: Main) -> asyncio.Task[Any]:
        """Run ``main`` as member ``name``, and return its task."""
        if name in self.tasks:
            raise UsageError(f"name: a member was called {name!r} before; each incarnation needs a name of its own")
        source = self._sources[name] = LocalWorldSource(self, name)
        self.tasks[name] = asyncio.create_task(main(source), name=f"member {name}")
        return self.tasks[name]

    def kill(self, name: str, how: str = "was killed") -> None:
        """Let a member disappear as a killed process would: it says nothing more, and runs no further."""
        source = self._sources.pop(name, None)
        if source is None:
            return
        source.disappear()
        self.tasks[name].cancel()
        self.obey(self.director.lost(name, how, self.now()))

    def drain(self, name: str) -> None:
        """Let a member leave at the end of a step."""
        self.obey(self.director.drain(name))

    def is_running(self, name: str) -> bool:
        """Is this member alive, and has not left?"""
        return name in self._sources

    # -- for the sources -----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def left(self, name: str) -> None:
        """Remove a member that needs no more worlds."""
        if self._sources.pop(name, None) is not None:
            self.obey(self.director.lost(name, "left", self.now()))

    def donors(self) -> list[Donor]:
        """Return the members that have the state."""
        members = self.director.members
        if self.director.has_begun and not members:
            raise LaunchError("the job is over: all its members have left")
        self._asked += 1
        found: list[Donor] = [LocalDonor(self, name) for name in members if name in self._sources]
        return rotated(found, self._asked)

    def shelf(self, name: str) -> SnapshotShelf:
        """Return what a member gives to newcomers.  Raises ``PeerLost`` if it is gone."""
        source = self._sources.get(name)
        if source is None or source.shelf is None:
            raise PeerLost(f"{name} is gone", cause="it is gone")
        return source.shelf

    async def taken(self, name: str, generation: int) -> None:
        """Note that a member takes a world; return when all have, as where processes meet in a rendezvous."""
        if generation == self.worlds[-1].generation:
            self._taking.discard(name)
            if not self._taking:
                self._all_take.set()
            await self._all_take.wait()

    def obey(self, commands: Iterable[DirectorCommand]) -> None:
        """Do what the director says."""
        for command in commands:
            match command:
                case RevokeWorld(generation, members, why, is_planned):
                    for source in self._of(members):
                        source.hear_revoked(generation, None if is_planned else PeerLost(why, cause=why))
                case AnnouncePending(generation, members):
                    for source in self._of(members):
                        source.pending = generation
                case Evict(member, why):
                    for source in self._of([member]):
                        source.evicted(why)
                case FormWorld():
                    self._form(command)

    def _form(self, formed: FormWorld) -> None:
        self.worlds.append(formed)
        self._fabric = InprocFabric()
        self._taking, self._all_take = set(formed.members), asyncio.Event()
        members = tuple(Member(rank=rank) for rank in range(len(formed.members)))
        world = World(members=members, generation=formed.generation)
        for rank, name in enumerate(formed.members):
            if name in self._sources:
                self._sources[name].welcome(formed, rank, world, self._fabric)
            self.director.ready(name, formed.generation)  # of one process: it can be connected to at once

    def _of(self, members: Iterable[str]) -> list[LocalWorldSource]:
        return [self._sources[name] for name in members if name in self._sources]

    def _tick(self) -> None:
        self.obey(self.director.tick(self.now()))
        self._ticking = asyncio.get_running_loop().call_later(_TICK, self._tick)


class LocalWorldSource:
    """The worlds of one member."""

    def __init__(self, worlds: ElasticWorlds, name: str) -> None:
        self.name = name
        self.shelf: SnapshotShelf | None = None
        self.pending = -1
        self._worlds = worlds
        self._coming: asyncio.Future[Membership | None] | None = None
        self._callbacks: list[OnRevoked] = []
        self._links: Links | None = None
        self._fabric: InprocFabric | None = None

    async def donors(self) -> Sequence[Donor]:
        return self._worlds.donors()

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:  # noqa: ARG002
        self.shelf = shelf
        self._check()
        coming = self._wait()
        self._worlds.obey(self._worlds.director.arrive(self.name, lineage, self._worlds.now()))
        membership = await coming
        assert membership is not None
        return membership

    def progress(self, lineage: Lineage) -> None:
        self._worlds.obey(self._worlds.director.progress(self.name, lineage, self._worlds.now()))

    async def withdraw(self) -> None:
        self._coming = None
        self._worlds.obey(self._worlds.director.withdraw(self.name, self._worlds.now()))

    async def next_world(self, report: MemberReport) -> Membership | None:
        self._check()
        coming = self._wait()
        self._worlds.obey(self._worlds.director.report(self.name, report, self._worlds.now()))
        return await coming

    def refused(self, why: str) -> None:
        """Do nothing: it ends, and nobody starts it again."""

    def on_revoked(self, callback: OnRevoked) -> None:
        self._callbacks.append(callback)

    def has_pending(self, generation: int) -> bool:
        return self.pending == generation

    async def hold_lease(self) -> None:
        pass  # of one process: none is stopped without the others

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:  # noqa: ARG002
        self._worlds.left(self.name)

    # -- what happens to it --------------------------------------------------------------------------------------------

    def hear_revoked(self, generation: int, why: BaseException | None) -> None:
        """Handle the end of a world."""
        for callback in self._callbacks:
            callback(generation, why)

    def evicted(self, why: str) -> None:
        """End this member, for which there is no place any more."""
        if self._coming is None or self._coming.done():
            return
        if why == "drained":
            self._coming.set_result(None)
        elif self._worlds.director.trouble is not None:
            self._coming.set_exception(LaunchError(why))
        else:
            self._coming.set_exception(StaleGeneration(why))

    def welcome(self, formed: FormWorld, rank: int, world: World, fabric: InprocFabric) -> None:
        """Make this member ``rank`` of a new world."""

        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            stack.callback(fabric.leave, rank)
            await self._worlds.taken(self.name, formed.generation)
            return WorldBootstrap(world=world, rank=rank, connector=InprocConnector(fabric), join=self._join)

        self._fabric = fabric
        if self._coming is not None and not self._coming.done():
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

    def disappear(self) -> None:
        """Let all channels of this member end, without a word."""
        self._callbacks.clear()
        if self._links is None or self._fabric is None:
            return
        rank = self._links.rank
        self._fabric.leave(rank)
        for other in range(self._links.world.size):
            lane = self._links.link(other).lane if other != rank and self._links.is_up(other) else None
            if lane is not None:
                lane.abort(PeerLost("killed", rank=rank))

    def _join(self, links: Links) -> None:
        assert self._fabric is not None
        self._links = links
        self._fabric.join(links)

    def _wait(self) -> asyncio.Future[Membership | None]:
        self._coming = asyncio.get_running_loop().create_future()
        return self._coming

    def _check(self) -> None:
        if self._worlds.director.trouble is not None:
            raise LaunchError(self._worlds.director.trouble)


class LocalDonor:
    """A member that newcomers of the same process ask."""

    def __init__(self, worlds: ElasticWorlds, name: str) -> None:
        self._worlds = worlds
        self.name = name

    async def position(self) -> int:
        return await self._worlds.shelf(self.name).position()

    async def pin(self, step: int) -> SnapshotDescription:
        return await self._worlds.shelf(self.name).pin(step)

    async def block(self, pin: int, name: str, number: int) -> bytes | memoryview:
        return await self._worlds.shelf(self.name).block(pin, name, number)

    async def update(self, pin: int, number: int) -> StepUpdate:
        return (await self._worlds.shelf(self.name).update(pin, number)).copied()

    async def lineage(self, pin: int, step: int) -> Lineage:
        return await self._worlds.shelf(self.name).lineage(pin, step)

    async def unpin(self, pin: int) -> None:
        await self._worlds.shelf(self.name).unpin(pin)
