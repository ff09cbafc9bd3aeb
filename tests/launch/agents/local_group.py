"""A group of hosts in one process whose leader never fails: what agents are tested against without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec

from asyncpar.net.membership.world_director import (
    AnnouncePending,
    DirectorCommand,
    ElasticDirector,
    Evict,
    FormWorld,
    RevokeWorld,
    StartWorld,
)
from asyncpar.net.membership.world_messages import (
    ChangePending,
    GroupHost,
    HostCommand,
    HostDraining,
    HostEvent,
    JobClosed,
    JobOpened,
    JobStopped,
    MemberArrived,
    MemberDied,
    MemberDismissed,
    MemberLeft,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MemberWithdrawn,
    PlacedMember,
    WorldAnnounced,
    WorldChange,
    WorldEnded,
    WorldStarted,
    WorldStatus,
)

TICK = 0.1


class LocalLeader:
    """Leads hosts of this process; every job begins with ``size`` members."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._director = ElasticDirector(size)
        self.hosts: dict[str, LocalGroup] = {}
        self._members: dict[str, MemberArrived] = {}
        self._addresses: dict[str, str] = {}
        self.job: JobOpened | None = None
        self.closed: JobClosed | None = None
        self.world: WorldAnnounced | None = None
        self.worlds: list[WorldAnnounced] = []
        self._ticking: asyncio.TimerHandle | None = None
        self._has_stopped = False
        self._first = 0
        """The generation of the first world of this director."""

    def join(self, name: str, address: str = "") -> LocalGroup:
        group = self.hosts[name] = LocalGroup(self, name, address)
        for command in (self.job, self.closed, self.world):
            if command is not None:
                group.queue.put_nowait(command)
        self.tick()
        return group

    def lose(self, name: str) -> None:
        """A host is gone, without a word."""
        self.hosts.pop(name)
        for member in [one for one, arrived in self._members.items() if arrived.host == name]:
            self.take(name, MemberDied(member, "was lost with its host"))

    def tick(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        loop = asyncio.get_running_loop()
        self._obey(self._director.tick(loop.time()))
        self._ticking = loop.call_later(TICK, self.tick)

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    def take(self, host: str, event: HostEvent) -> None:  # noqa: C901  # one case each
        now, director = asyncio.get_running_loop().time(), self._director
        match event:
            case JobOpened(number=number):
                before = 0 if self.job is None else self.job.number
                if number == before + 1:
                    self.job, self.closed, self.world = event, None, None
                    self._begin_anew()
                    self.tell(event)
            case JobClosed(number=number):
                if self.job is not None and self.job.number == number and self.closed is None:
                    self.closed = event
                    self.tell(event)
            case MemberArrived():
                self._members[event.member] = event
                self._obey(director.arrive(event.member, event.lineage, now))
            case MemberProgressed(member, lineage):
                self._obey(director.progress(member, lineage, now))
            case MemberWithdrawn(member):
                self._obey(director.withdraw(member, now))
            case MemberReady(member, generation, address):
                self._addresses[member] = address
                self._obey(director.ready(member, generation - self._first))
            case MemberReported(member=member, report=report, why=why):
                report = msgspec.structs.replace(report, generation=report.generation - self._first)
                self._obey(director.report(member, report, now, why))
            case MemberLeft(member):
                self._obey(director.lost(member, "left", now))
            case MemberDied(member, how):
                self._obey(director.lost(member, how, now))
            case HostDraining(name):
                for member in [one for one, arrived in self._members.items() if arrived.host == name]:
                    self._obey(director.drain(member))

    def _begin_anew(self) -> None:
        self._first += self._director.generation + 1
        self._director, self._has_stopped = ElasticDirector(self._size), False

    def tell(self, command: HostCommand) -> None:
        for group in self.hosts.values():
            group.queue.put_nowait(command)

    def _obey(self, commands: Sequence[DirectorCommand]) -> None:
        for command in commands:
            match command:
                case RevokeWorld(generation, _, why, is_planned):
                    self.tell(WorldEnded(generation + self._first, why, is_planned=is_planned))
                case AnnouncePending(generation, _):
                    self.tell(ChangePending(generation + self._first))
                case StartWorld(generation, members):
                    addresses = tuple(self._addresses[member] for member in members)
                    self.tell(WorldStarted(generation + self._first, addresses))
                case Evict(member, why):
                    self.tell(MemberDismissed(member, why, is_drained=why == "drained"))
                case FormWorld():
                    self._form(command)
        if self._director.trouble == "all members are lost" and self.world is not None:
            lost = tuple(member.name for member in self.world.members)
            waiting = [command.member for command in commands if isinstance(command, Evict)]
            self._begin_anew()
            change = WorldChange(generation=self._first, left=lost, why="all members are lost")
            self.world = msgspec.structs.replace(self.world, generation=self._first, members=(), change=change)
            self._first += 1
            self.tell(self.world)
            for member in waiting:
                self.tell(MemberDismissed(member, "all members are lost"))
        elif self._director.trouble is not None and self.job is not None and not self._has_stopped:
            self._has_stopped = True
            self.tell(JobStopped(self.job.number, self._director.trouble))

    def _form(self, formed: FormWorld) -> None:
        members = tuple(
            PlacedMember(name=name, host=self._members[name].host, address=self._members[name].address)
            for name in formed.members
        )
        self.world = WorldAnnounced(
            generation=formed.generation + self._first,
            members=members,
            lineage=formed.lineage,
            decision=formed.decision,
            change=replace(formed.change, generation=formed.generation + self._first),
        )
        self.worlds.append(self.world)
        self.tell(self.world)


class LocalGroup:
    """The group as one host has it.  See ``WorldGroup``."""

    def __init__(self, leader: LocalLeader, name: str, address: str) -> None:
        self._leader = leader
        self._name = name
        self.address = address
        self.queue: asyncio.Queue[HostCommand | None] = asyncio.Queue()
        self.lease = 60.0

    @property
    def commands(self) -> AsyncIterator[HostCommand]:
        return self._commands()

    async def _commands(self) -> AsyncIterator[HostCommand]:
        while (command := await self.queue.get()) is not None:
            yield command

    def tell(self, event: HostEvent) -> None:
        asyncio.get_running_loop().call_soon(self._leader.take, self._name, event)

    async def status(self) -> WorldStatus:
        leader = self._leader
        hosts = tuple(GroupHost(name=name, address=group.address) for name, group in leader.hosts.items())
        return WorldStatus(
            leader=next(iter(leader.hosts)), hosts=hosts, world=leader.world, job=leader.job, closed=leader.closed
        )

    async def stop(self) -> None:
        self.queue.put_nowait(None)
        if self._name in self._leader.hosts:
            self._leader.lose(self._name)
