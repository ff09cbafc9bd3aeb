"""Worlds from a director at the other end of an inherited socket: how a process of an elastic job gets its worlds.

Theory of operation.  Both sides write JSON objects, one per line.  The process says that it is ready (``join``), how
far it has come (``progress``), that it begins anew (``withdraw``) or is not admitted by those who train (``differs``),
what it has when a world ends (``report``), where it can be reached in a world that forms (``address``), that it asks to
leave (``depart``), and that it leaves (``leave``).  The director answers with worlds, with the addresses of all their
members, and says when a world is revoked, when a change waits for the end of a step, whether who asks to leave is
``refused``, and why the job is ``over``.  A process asks, too, for how long it may commit (``lease``), and is answered
behind all that the director has said before.  The socket is private to the two; whatever goes between members carries
the job's token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeAlias

from asyncpar.bootstrap import WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.elasticity.donors import Donor, SnapshotShelf
from asyncpar.elasticity.worlds import Membership, OnRevoked
from asyncpar.errors import LaunchError, PeerLost, ProtocolError, StaleGeneration
from asyncpar.net.membership.lineage import Decision, Lineage, MemberReport
from asyncpar.net.membership.pipe_messages import decode_lineage, encode_lineage
from asyncpar.net.membership.world_messages import WorldChange

_MOST_WORDS = 1000

Served: TypeAlias = tuple[str, Callable[[World, int], WorldBootstrap]]
"""Where links are accepted, and what a node starts with once its world and its rank are known."""


class ClosableDonor(Donor, Protocol):
    """A donor over a connection."""

    async def close(self) -> None:
        """Close the connection."""
        ...


class RankPipe(Protocol):
    """The way of a rank to its agent, and its servers for other ranks: over sockets and gRPC, or simulated."""

    @property
    def is_open(self) -> bool:
        """Can messages be written?"""
        ...

    async def open(self, take: Callable[[dict[str, Any]], None], end: Callable[[Exception], None]) -> None:
        """Pass each message of the agent to ``take``, and why none follows to ``end``; once."""
        ...

    def write(self, message: dict[str, Any]) -> None:
        """Send ``message`` to the agent, if the pipe is open; never waits."""
        ...

    async def serve_snapshots(self, shelf: SnapshotShelf) -> str:
        """Serve ``shelf`` to joining ranks until ``close``; return the address; once."""
        ...

    def donor(self, name: str, address: str) -> ClosableDonor:
        """Return the member ``name`` as the donor that serves its snapshots at ``address``."""
        ...

    async def serve_links(self, stack: AsyncExitStack, certified: list[int] | None) -> Served:
        """Accept links of the next world from now on, until ``stack`` is closed.

        ``certified`` are the numbers in the certificates of its ranks, None if they have none.
        """
        ...

    async def close(self) -> None:
        """Let the agent read what was written, and close everything."""
        ...


class PipeWorlds:
    """The worlds of this process, as its agent announces them over ``pipe``."""

    def __init__(self, pipe: RankPipe) -> None:
        self._pipe = pipe
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._generation = -1
        """That of the last world that was announced."""
        self._addresses: asyncio.Future[list[Any]] | None = None
        """Those of its members, once all can be connected to."""
        self._callbacks: list[OnRevoked] = []
        self._pending = -1
        self._reached: Lineage | None = None
        """How far this process has come while it waits for its first world."""
        self._lease = CommitLease(lambda: self._write({"kind": "lease", "steps": self._count_steps()}))
        self._end: Exception | None = None
        self._is_drained = False
        """No world comes any more, whatever is asked for: the job is complete, or this process leaves it."""
        self._refused: Callable[[], None] = lambda: None
        self._is_opened = False
        self._snapshots_at: str | None = None
        self._count_steps: Callable[[], int] = lambda: 0
        """Returns how many steps are committed here."""
        self._donors: list[ClosableDonor] = []

    # -- what a job asks -----------------------------------------------------------------------------------------------

    async def donors(self) -> Sequence[Donor] | None:
        """See ``WorldSource``."""
        found = await self._ask("donors", {"kind": "donors"})
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
        place = {"address": self._snapshots_at, "settings": dict(shelf.settings)}
        message = {"kind": "join", "lineage": encode_lineage(self._reached), **place}
        membership = await self._ask("world", message)
        if membership is None:
            raise PeerLost("no world comes for this rank: the job is complete", cause="the job is complete")
        assert isinstance(membership, Membership)
        return membership

    def progress(self, lineage: Lineage) -> None:
        """See ``WorldSource``."""
        self._reached = lineage  # if the server of snapshots is starting, ``join`` tells it
        self._write({"kind": "progress", "lineage": encode_lineage(lineage)})

    async def withdraw(self) -> None:
        """See ``WorldSource``.  Messages of the director before its answer are void."""
        await self._ask("withdrawn", {"kind": "withdraw"})

    def refused(self, why: str) -> None:
        """See ``WorldSource``."""
        self._write({"kind": "differs", "why": why[:_MOST_WORDS]})

    async def next_world(self, report: MemberReport) -> Membership | None:
        """See ``WorldSource``."""
        message = {
            "kind": "report",
            "generation": report.generation,
            "lineage": encode_lineage(report.lineage),
            "prepared": encode_lineage(report.prepared),
            "suspects": [list(suspect) for suspect in report.suspects],
        }
        membership = await self._ask("world", message)
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
        self._write({"kind": "leave", "failed": step, "why": why[:_MOST_WORDS]})
        for donor in self._donors:
            await donor.close()
        await self._pipe.close()

    def ask_to_leave(self, refused: Callable[[], None]) -> bool:
        """Ask that this process is drained, and return whether anybody was asked; ``refused`` is called if it is not.

        The answer to its next report is that it leaves.
        """
        if not self._pipe.is_open or self._end is not None:
            return False
        self._refused = refused
        self._write({"kind": "depart"})
        return True

    # -- messages ------------------------------------------------------------------------------------------------------

    async def _ask(self, answer: str, message: dict[str, Any]) -> Any:
        if not self._is_opened:
            self._is_opened = True
            await self._pipe.open(self._take, self._fail)
        if self._end is not None:
            raise self._end
        if self._is_drained and answer in ("world", "donors"):
            return None
        future = self._answers[answer] = asyncio.get_running_loop().create_future()
        self._write(message)
        return await future

    def _write(self, message: dict[str, Any]) -> None:
        self._pipe.write(message)

    def _take(self, message: dict[str, Any]) -> None:
        """Take a message of the agent, which may repeat what a leader before has announced, or come late."""
        if self._end is not None:
            return
        try:
            self._obey(message)
        except (ProtocolError, LookupError, TypeError, ValueError) as error:
            self._fail(ProtocolError(f"the director of this job sent something else than expected: {error}"))

    def _obey(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "donors":
                self._settle("donors", message["donors"])
            case "world":
                self._announced(message)
            case "withdrawn":
                self._settle("withdrawn", None)
            case "lease":
                self._lease.grant(float(message["seconds"]))
            case "drained":
                self._is_drained = True
                self._settle("world", None)
                self._settle("donors", None)
            case "members":
                self._take_members(int(message["generation"]), message["members"])
            case "revoked":
                why = None if message["planned"] else PeerLost(message["why"], cause=message["why"])
                for callback in self._callbacks:
                    callback(message["generation"], why)
            case "pending":
                self._pending = max(self._pending, int(message["generation"]))
            case "refused":
                self._refused()
            case "over":
                self._fail(LaunchError(message["why"]))
            case kind:
                raise ValueError(f"unknown kind {kind!r}")

    def _announced(self, message: dict[str, Any]) -> None:
        """Go on to the next world; one that was announced before, or is over, comes again for nothing."""
        membership = self._membership(message)
        if membership.generation > self._generation:
            self._generation = membership.generation
            self._addresses = asyncio.get_running_loop().create_future()
            self._settle("world", membership)

    def _take_members(self, generation: int, members: list[Any]) -> None:
        """Take the addresses of the members of a world: those of the current one, once."""
        addresses = self._addresses
        if generation > self._generation:
            raise ValueError(f"the members of generation {generation} came before it was announced")
        if generation == self._generation and addresses is not None and not addresses.done():
            addresses.set_result(members)

    def _settle(self, answer: str, value: Any) -> None:
        future = self._answers.get(answer)
        if future is not None and not future.done():
            future.set_result(value)

    def _fail(self, error: Exception) -> None:
        """Fail all that wait: nothing comes any more."""
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

    def _membership(self, message: dict[str, Any]) -> Membership:
        generation, rank, hosts, job = (message[key] for key in ("generation", "rank", "hosts", "job"))
        certified = _read_certified(message.get("certified"), len(hosts))
        lineage = decode_lineage(message["lineage"])
        if lineage is None:
            raise ProtocolError(f"world: expected a lineage, got none for generation {generation}")

        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            address, bootstrap = await self._pipe.serve_links(stack, certified)
            self._write({"kind": "address", "generation": generation, "address": address})
            addresses = await self._members(generation)
            members = tuple(
                Member(rank=place, host=host, host_id=host, local_rank=hosts[:place].count(host), address=address)
                for place, (host, address) in enumerate(zip(hosts, addresses, strict=True))
            )
            return bootstrap(World(members=members, generation=generation, job=job), rank)

        change = WorldChange(
            generation=generation,
            joined=tuple(message["joined"]),
            left=tuple(message["left"]),
            why=message["why"],
            is_by_loss=message["is_by_loss"],
        )
        return Membership(
            generation=generation,
            rank=rank,
            size=len(hosts),
            attach=attach,
            lineage=lineage,
            decision=Decision(message["decision"]),
            change=change,
        )

    async def _members(self, generation: int) -> list[Any]:
        """Return the addresses of the members of the world of ``generation``, once all can be connected to."""
        addresses = self._addresses
        if generation != self._generation or addresses is None:
            raise StaleGeneration(f"generation {generation} is over: {self._generation} was announced meanwhile")
        return await asyncio.shield(addresses)  # who stops waiting leaves it to be set


def _read_certified(content: Any, size: int) -> list[int] | None:
    """Return the numbers in the certificates of the ranks of a world, None if they have none."""
    if content is None:
        return None
    numbers = [int(number) for number in content]
    if len(numbers) != size or min(numbers, default=0) < 0:
        raise ProtocolError(f"world: expected the numbers of {size} certificates, got {content!r}")
    return numbers
