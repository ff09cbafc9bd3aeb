"""Worlds from a director at the other end of an inherited socket: how a process of an elastic job gets its worlds.

Theory of operation.  Both sides write JSON objects, one per line.  The process says that it is ready (``join``), how
far it has come (``progress``), that it begins anew (``withdraw``), what it has when a world ends (``report``), where it
can be reached in a world that forms (``address``), that it asks to leave (``depart``), and that it leaves (``leave``).
The director answers with worlds, with the addresses of all their members, and says when a world is revoked or a change
waits for the end of a step, and whether who asks to leave is ``refused``.  A process asks, too, for how long it may
commit (``lease``), and is answered behind all that the director has said before.  The socket is private to the two;
whatever goes between members carries the job's token.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from asyncpar.actors.runtime.gateway import ActorGateway
from asyncpar.bootstrap import WorldBootstrap, answer_agent, arena_settings, serve_links
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.core.config.world import Member, World
from asyncpar.core.system_errors import os_reason
from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.elasticity.donors import Donor, SnapshotShelf
from asyncpar.elasticity.snapshot_service import RemoteDonor, add_snapshot_service
from asyncpar.elasticity.worlds import Membership, OnRevoked
from asyncpar.errors import LaunchError, PeerLost, ProtocolError, StaleGeneration, UsageError
from asyncpar.net.membership.credentials import read_elastic_credentials
from asyncpar.net.membership.lineage import Decision, Lineage, MemberReport
from asyncpar.net.membership.pipe_messages import MOST_BYTES, decode_lineage, encode_lineage
from asyncpar.net.membership.world_messages import WorldChange
from asyncpar.net.security.identity import role_in
from asyncpar.net.transport.rpc import RpcServer

_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_BIND = "ASYNCPAR_BIND"
_MOST_WORDS = 1000


class PipeWorlds:
    """The worlds of this process, as a director on this host tells of them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises ``UsageError`` if ``environment`` names no open socket, or no secret."""
        text = environment.get(ELASTIC_PIPE, "")
        secret = environment.get(_SECRET_FILE)
        if not text.isdecimal() or not secret:
            raise UsageError(f"{ELASTIC_PIPE}: expected the number of an open socket, and {_SECRET_FILE}; got {text!r}")
        try:
            self._socket = socket.socket(fileno=os.dup(int(text)))
        except OSError as error:
            raise UsageError(f"{ELASTIC_PIPE}: descriptor {text} is not an open socket ({os_reason(error)})") from error
        answer_agent(environment)
        self._credentials = read_elastic_credentials(environment)
        self._bind = environment.get(_BIND, "127.0.0.1")
        self._stack = AsyncExitStack()
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._addresses: dict[int, asyncio.Future[list[Any]]] = {}
        self._callbacks: list[OnRevoked] = []
        self._pending = -1
        self._reached: Lineage | None = None
        """How far this process has come while it waits for its first world."""
        self._lease = CommitLease(lambda: self._write({"kind": "lease", "steps": self._count_steps()}))
        self._end: Exception | None = None
        self._refused: Callable[[], None] = lambda: None
        self._snapshots: RpcServer | None = None
        self._count_steps: Callable[[], int] = lambda: 0
        """Returns how many steps are committed here."""
        self._donors: list[RemoteDonor] = []

    # -- what a job asks -----------------------------------------------------------------------------------------------

    async def donors(self) -> Sequence[Donor] | None:
        """See ``WorldSource``."""
        found = await self._ask("donors", {"kind": "donors"})
        if found is None:
            return None
        for donor in self._donors:
            await donor.close()
        self._donors = [RemoteDonor(name, address, self._credentials, role_in(name)) for name, address in found]
        return self._donors

    async def join(self, lineage: Lineage, shelf: SnapshotShelf, *, is_healed: bool) -> Membership:  # noqa: ARG002
        """See ``WorldSource``."""
        self._reached, self._count_steps = lineage, lambda: shelf.steps
        if self._snapshots is None:
            self._snapshots = RpcServer(self._credentials, bind=self._bind)
            add_snapshot_service(self._snapshots.server, shelf, self._credentials.certificates)
            await self._snapshots.start()
            self._stack.push_async_callback(self._snapshots.stop, grace=0.0)
        place = {"address": self._snapshots.address, "settings": dict(shelf.settings)}
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

    async def leave(self, failed: tuple[int, str] | None = None) -> None:
        """See ``WorldSource``."""
        if self._writer is not None:
            step, why = failed or (None, "")
            self._write({"kind": "leave", "failed": step, "why": why[:_MOST_WORDS]})
            with suppress(OSError):
                await self._writer.drain()
        for donor in self._donors:
            await donor.close()
        await self._stack.aclose()

    def ask_to_leave(self, refused: Callable[[], None]) -> bool:
        """Ask that this process is drained, and return whether anybody was asked; ``refused`` is called if it is not.

        The answer to its next report is that it leaves.
        """
        if self._writer is None or self._writer.is_closing() or self._end is not None:
            return False
        self._refused = refused
        self._write({"kind": "depart"})
        return True

    # -- the socket ----------------------------------------------------------------------------------------------------

    async def _ask(self, answer: str, message: dict[str, Any]) -> Any:
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MOST_BYTES)
            reading = asyncio.create_task(self._read(reader), name="asyncpar director")
            self._stack.push_async_callback(_end_task, reading)
            self._stack.push_async_callback(close_stream, self._writer)
        if self._end is not None:
            raise self._end
        future = self._answers[answer] = asyncio.get_running_loop().create_future()
        self._write(message)
        return await future

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
            self._fail(LaunchError("the director of this job is gone"))
        except OSError as error:
            self._fail(LaunchError(f"the director of this job is gone: {error}"))
        except (ProtocolError, LookupError, RecursionError, TypeError, ValueError) as error:
            self._fail(ProtocolError(f"the director of this job sent something else than expected: {error}"))

    def _hear(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "donors":
                self._settle("donors", message["donors"])
            case "world":
                self._settle("world", self._membership(message))
            case "withdrawn":
                self._settle("withdrawn", None)
            case "lease":
                self._lease.grant(float(message["seconds"]))
            case "drained":
                self._settle("world", None)
                self._settle("donors", None)
            case "members":
                self._take_members(message["generation"], message["members"])
            case "revoked":
                why = None if message["planned"] else PeerLost(message["why"], cause=message["why"])
                for callback in self._callbacks:
                    callback(message["generation"], why)
            case "pending":
                self._pending = message["generation"]
            case "refused":
                self._refused()
            case "evicted":
                kind = LaunchError if message["is_over"] else StaleGeneration
                self._fail(kind(message["why"]))
            case kind:
                raise ValueError(f"unknown kind {kind!r}")

    def _take_members(self, generation: int, members: list[Any]) -> None:
        coming = self._members(generation)
        if coming.done():
            raise ValueError(f"the members of generation {generation} came twice")
        coming.set_result(members)

    def _settle(self, answer: str, value: Any) -> None:
        future = self._answers.get(answer)
        if future is not None and not future.done():
            future.set_result(value)

    def _fail(self, error: Exception) -> None:
        """Fail all that wait: nothing comes any more."""
        self._end = self._end or error
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        self._lease.end(error)
        for callback in self._callbacks:
            callback(1 << 60, error)

    # -- worlds --------------------------------------------------------------------------------------------------------

    def _membership(self, message: dict[str, Any]) -> Membership:
        generation, rank, hosts, job = (message[key] for key in ("generation", "rank", "hosts", "job"))
        credentials = self._credentials.in_world(_read_certified(message.get("certified"), len(hosts)))
        lineage = decode_lineage(message["lineage"])
        if lineage is None:
            raise ProtocolError(f"world: expected a lineage, got none for generation {generation}")

        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            gateway = ActorGateway()
            server, connector = await serve_links(stack, credentials, bind=self._bind, transport=None, gateway=gateway)
            self._write({"kind": "address", "generation": generation, "address": server.address})
            addresses = await self._members(generation)
            members = tuple(
                Member(rank=place, host=host, host_id=host, local_rank=hosts[:place].count(host), address=address)
                for place, (host, address) in enumerate(zip(hosts, addresses, strict=True))
            )
            return WorldBootstrap(
                world=World(members=members, generation=generation, job=job),
                rank=rank,
                connector=connector,
                join=connector.join,
                server=server,
                secret=credentials.secret,
                arena=arena_settings(os.environ, None),
                gateway=gateway,
            )

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

    def _members(self, generation: int) -> asyncio.Future[list[Any]]:
        if generation not in self._addresses:
            self._addresses = {generation: asyncio.get_running_loop().create_future()}
        return self._addresses[generation]


def _read_certified(content: Any, size: int) -> list[int] | None:
    """Return the numbers in the certificates of the ranks of a world, None if they have none."""
    if content is None:
        return None
    numbers = [int(number) for number in content]
    if len(numbers) != size or min(numbers, default=0) < 0:
        raise ProtocolError(f"world: expected the numbers of {size} certificates, got {content!r}")
    return numbers


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
