"""Worlds from a director at the other end of an inherited socket: the source of a process of an elastic job.

Theory of operation.  Both sides write the messages of ``pipe_messages``.  The process asks for donors, joins with its
state, withdraws to fetch it anew, reports its lineage when a world ends and its address in one that forms, and leaves.
The director answers with worlds and with the addresses of all their members, and announces when a world is revoked,
when a change waits for the end of a step, and why the job is over.  A process also asks for how long it may commit; the
answer follows everything that the director has sent before.  The socket is private to the two; all traffic between
members carries the job's token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeAlias, assert_never

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.elasticity.donors import Donor, SnapshotShelf
from asyncpar.elasticity.worlds import Membership, OnRevoked
from asyncpar.errors import LaunchError, PeerLost, ProtocolError, StaleGeneration
from asyncpar.hosts.lineage import Lineage, MemberReport
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
    LeaveJob,
    LeaveRefused,
    LeaveWanted,
    LinksServed,
    NotAdmitted,
    PipeMessage,
    RankMessage,
    StateReached,
    Withdraw,
    Withdrawn,
    WorldFormed,
    WorldOver,
    WorldReport,
)

_MOST_WORDS = 1000

Served: TypeAlias = tuple[str, Callable[[World, int], WorldBootstrap]]
"""The address where links are accepted, and a function from world and rank to a node's bootstrap."""


class ClosableDonor(Donor, Protocol):
    """A donor over a connection."""

    async def close(self) -> None:
        """Close the connection."""
        ...


class RankPipe(Protocol):
    """The connection of a rank to its agent, and its servers for other ranks: over sockets and gRPC, or simulated."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be written."""
        ...

    async def open(self, take: Callable[[AgentMessage], None], end: Callable[[Exception], None]) -> None:
        """Pass each message of the agent to ``take``, and the reason of the end to ``end``; once."""
        ...

    def write(self, message: RankMessage) -> None:
        """Send ``message`` to the agent, if the pipe is open; never waits."""
        ...

    async def serve_snapshots(self, shelf: SnapshotShelf) -> str:
        """Serve ``shelf`` to joining ranks until ``close``; return the address; once."""
        ...

    def donor(self, name: str, address: str) -> ClosableDonor:
        """Return the member ``name`` as the donor that serves its snapshots at ``address``."""
        ...

    async def serve_links(self, stack: AsyncExitStack, certified: Sequence[int] | None) -> Served:
        """Accept links of the next world from now on, until ``stack`` is closed.

        ``certified`` are the numbers in the certificates of its ranks, None if they have none.
        """
        ...

    async def close(self) -> None:
        """Let the agent read everything that was written, then close everything."""
        ...


class PipeWorlds:
    """The worlds of this process, as its agent announces them over ``pipe``."""

    def __init__(self, pipe: RankPipe) -> None:
        self._pipe = pipe
        self._answers: dict[type[PipeMessage], asyncio.Future[Any]] = {}
        self._generation = -1
        """The generation of the last announced world."""
        self._addresses: asyncio.Future[tuple[str, ...]] | None = None
        """The addresses of its members, once all accept connections."""
        self._callbacks: list[OnRevoked] = []
        self._pending = -1
        self._reached: Lineage | None = None
        """The lineage that this process has reached while it waits for its first world."""
        self._lease = CommitLease(lambda: self._write(LeaseWanted(self._count_steps())))
        self._end: Exception | None = None
        self._is_drained = False
        """Whether no further world comes: the job is complete, or this process leaves it."""
        self._refused: Callable[[], None] = lambda: None
        self._is_opened = False
        self._snapshots_at: str | None = None
        self._count_steps: Callable[[], int] = lambda: 0
        """Returns the number of steps committed here."""
        self._donors: list[ClosableDonor] = []

    # -- the job's interface -------------------------------------------------------------------------------------------

    async def donors(self) -> Sequence[Donor] | None:
        """See ``WorldSource``."""
        found = await self._ask(DonorsFound, DonorsWanted())
        if found is None:
            return None
        for donor in self._donors:
            await donor.close()
        self._donors = [self._pipe.donor(name, address) for name, address in found]
        return self._donors

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:  # noqa: ARG002
        """See ``WorldSource``."""
        self._reached, self._count_steps = lineage, lambda: shelf.steps
        if self._snapshots_at is None:
            self._snapshots_at = await self._pipe.serve_snapshots(shelf)
        settings = tuple((str(name), str(value)) for name, value in dict(shelf.settings).items())
        membership = await self._ask(WorldFormed, JoinWorld(self._reached, self._snapshots_at, settings))
        if membership is None:
            raise PeerLost("no world comes for this rank: the job is complete", cause="the job is complete")
        assert isinstance(membership, Membership)
        return membership

    def progress(self, lineage: Lineage) -> None:
        """See ``WorldSource``."""
        self._reached = lineage  # if the server of snapshots is still starting, ``join`` reports it
        self._write(StateReached(lineage))

    async def withdraw(self) -> None:
        """See ``WorldSource``.  Messages of the director before its answer are void."""
        await self._ask(Withdrawn, Withdraw())

    def refused(self, why: str) -> None:
        """See ``WorldSource``."""
        self._write(NotAdmitted(why[:_MOST_WORDS]))

    async def next_world(self, report: MemberReport) -> Membership | None:
        """See ``WorldSource``."""
        membership = await self._ask(WorldFormed, WorldReport(report))
        assert membership is None or isinstance(membership, Membership)
        return membership

    def on_revoked(self, callback: OnRevoked) -> None:
        """See ``WorldSource``."""
        self._callbacks.append(callback)

    def has_pending(self, generation: int) -> bool:
        """See ``WorldSource``."""
        return self._pending == generation

    async def hold_lease(self) -> None:
        """See ``WorldSource``."""
        await self._lease.hold()

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:
        """See ``WorldSource``."""
        step, why = failed or (None, "")
        self._write(LeaveJob(step, why[:_MOST_WORDS]))
        for donor in self._donors:
            await donor.close()
        await self._pipe.close()

    def ask_to_leave(self, refused: Callable[[], None]) -> bool:
        """Ask to be drained, and return whether there was an agent to ask; ``refused`` is called if that is refused.

        The answer to the next report is then that this process leaves.
        """
        if not self._pipe.is_open or self._end is not None:
            return False
        self._refused = refused
        self._write(LeaveWanted())
        return True

    # -- messages ------------------------------------------------------------------------------------------------------

    async def _ask(self, answer: type[PipeMessage], message: RankMessage) -> Any:
        if not self._is_opened:
            self._is_opened = True
            await self._pipe.open(self._take, self._fail)
        if self._end is not None:
            raise self._end
        if self._is_drained and answer in (WorldFormed, DonorsFound):
            return None
        future = self._answers[answer] = asyncio.get_running_loop().create_future()
        self._write(message)
        return await future

    def _write(self, message: RankMessage) -> None:
        self._pipe.write(message)

    def _take(self, message: AgentMessage) -> None:
        """Take a message of the agent; it may repeat announcements of a former leader, or be late."""
        if self._end is not None:
            return
        try:
            self._obey(message)
        except ValueError as error:
            self._fail(ProtocolError(f"the director of this job sent an unexpected message: {error}"))

    def _obey(self, message: AgentMessage) -> None:
        match message:
            case DonorsFound(donors):
                self._settle(DonorsFound, donors)
            case WorldFormed():
                self._announced(message)
            case Withdrawn():
                self._settle(Withdrawn, None)
            case LeaseGranted(seconds):
                self._lease.grant(seconds)
            case Drained():
                self._is_drained = True
                self._settle(WorldFormed, None)
                self._settle(DonorsFound, None)
            case AllServed(generation, addresses):
                self._take_addresses(generation, addresses)
            case WorldOver(generation, why, is_planned):
                for callback in self._callbacks:
                    callback(generation, None if is_planned else PeerLost(why, cause=why))
            case ChangeWaits(generation):
                self._pending = max(self._pending, generation)
            case LeaveRefused():
                self._refused()
            case JobOver(why):
                self._fail(LaunchError(why))
            case _:
                assert_never(message)

    def _announced(self, world: WorldFormed) -> None:
        """Go on to the next world; repeated announcements, and worlds that are over, have no effect."""
        if world.generation > self._generation:
            self._generation = world.generation
            self._addresses = asyncio.get_running_loop().create_future()
            self._settle(WorldFormed, self._membership(world))

    def _take_addresses(self, generation: int, members: tuple[str, ...]) -> None:
        """Take the addresses of the members of a world: those of the current one, once."""
        addresses = self._addresses
        if generation > self._generation:
            raise ValueError(f"the members of generation {generation} came before it was announced")
        if generation == self._generation and addresses is not None and not addresses.done():
            addresses.set_result(members)

    def _settle(self, answer: type[PipeMessage], value: Any) -> None:
        future = self._answers.get(answer)
        if future is not None and not future.done():
            future.set_result(value)

    def _fail(self, error: Exception) -> None:
        """Fail everything that waits: no more messages come."""
        if self._end is not None:
            return
        self._end = error
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        self._lease.end(error)
        for callback in self._callbacks:
            callback(1 << 60, error)

    # -- worlds --------------------------------------------------------------------------------------------------------

    def _membership(self, formed: WorldFormed) -> Membership:
        generation, hosts = formed.generation, formed.hosts

        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            address, bootstrap = await self._pipe.serve_links(stack, formed.certified)
            self._write(LinksServed(generation, address))
            addresses = await self._all_served(generation)
            members = tuple(
                Member(rank=place, host=host, host_id=host, local_rank=hosts[:place].count(host), address=address)
                for place, (host, address) in enumerate(zip(hosts, addresses, strict=True))
            )
            return bootstrap(World(members=members, generation=generation, job=formed.job), formed.rank)

        return Membership(
            generation=generation,
            rank=formed.rank,
            size=len(hosts),
            attach=attach,
            lineage=formed.lineage,
            decision=formed.decision,
            change=formed.change,
        )

    async def _all_served(self, generation: int) -> tuple[str, ...]:
        """Return the addresses of the members of the world of ``generation``, once all accept connections."""
        addresses = self._addresses
        if generation != self._generation or addresses is None:
            raise StaleGeneration(f"generation {generation} is over: {self._generation} was announced meanwhile")
        return await asyncio.shield(addresses)  # a caller that stops waiting leaves it to be set
