"""Elastic worlds of real processes on this host, for tests and benchmarks: killed, stopped, drained, added."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.errors import LaunchError, UsageError
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.membership.lineage import MemberReport
from asyncpar.net.membership.pipe_messages import MOST_BYTES, decode_lineage, encode_lineage
from asyncpar.net.membership.world_director import (
    STOPPED_PATIENCE,
    AnnouncePending,
    DirectorCommand,
    ElasticDirector,
    Evict,
    FormWorld,
    RevokeWorld,
    StartWorld,
    rotated,
)

_LOOK_SECONDS = 0.1
_LEASE_SECONDS = 2.0
"""For how long after a question a member may commit: longer than an answer takes on a busy machine.  A member that is
stopped for less than that is held for lost, too; only one that is alone in its world could commit a step then."""


@dataclass
class _Member:
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    host: str
    snapshots: str = ""
    address: str = ""
    stopped_at: float | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_gone: bool = False
    is_lost: bool = False
    """Was it stopped for so long that the others go on without it?"""
    has_place: bool = False


class ProcessWorlds:
    """Runs members of an elastic job as processes, and directs them: ``async with ProcessWorlds(4) as worlds``.

    ``size`` members make the first world.  Programs find their worlds by ``ap.elastic(...)``.  With ``spares`` no more
    than ``size`` are let in at a time: the others wait for a place.
    """

    def __init__(self, size: int, *, environment: Mapping[str, str] | None = None, spares: bool = False) -> None:
        self.director = ElasticDirector(size)
        self._places = size if spares else None
        self._asking: list[str] = []
        self.worlds: list[tuple[float, FormWorld]] = []
        """All worlds so far, with the time at which they were decided."""
        self.exits: dict[str, int] = {}
        """The exit codes of members that have ended."""
        self._environment = dict(os.environ if environment is None else environment)
        self._members: dict[str, _Member] = {}
        self._addresses: dict[str, str] = {}
        self._handed: dict[str, str] = {}
        """Who takes the place of whom that is drained."""
        self._asked = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncpar-elastic-")
        create_secret(self._secret_file)
        self._looking = asyncio.create_task(self._look(), name="look at processes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._looking is not None
        assert self._folder is not None
        self._looking.cancel()
        for member in self._members.values():
            if member.process.returncode is None:
                with suppress(ProcessLookupError):
                    member.process.kill()
        tasks = [task for member in self._members.values() for task in member.tasks]
        await asyncio.wait([*tasks, self._looking])
        self._folder.cleanup()

    @property
    def _secret_file(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "secret"

    # -- faults --------------------------------------------------------------------------------------------------------

    async def start(self, name: str, arguments: Sequence[str], *, host: str = "localhost") -> None:
        """Start ``python arguments`` as member ``name``, which pretends to be on ``host``."""
        if name in self._members:
            raise UsageError(f"name: a member was called {name!r} before; each incarnation needs a name of its own")
        here, there = socket.socketpair()
        with there:
            environment = {
                **self._environment,
                ELASTIC_PIPE: str(there.fileno()),
                "ASYNCPAR_SECRET_FILE": str(self._secret_file),
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env=environment, pass_fds=[there.fileno()]
            )
        reader, writer = await asyncio.open_connection(sock=here, limit=MOST_BYTES)
        member = self._members[name] = _Member(process, writer, host)
        member.tasks = [
            asyncio.create_task(self._serve(name, reader), name=f"hear {name}"),
            asyncio.create_task(self._reap(name), name=f"reap {name}"),
        ]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a member."""
        self._members[name].process.send_signal(number)

    def drain(self, name: str) -> None:
        """Let a member leave at the end of a step; where one waits for a place, when that one is there to take it."""
        successor = self._asking[0] if self._asking else None
        if successor is None:
            self._obey(self.director.drain(name))
            return
        self._members[name].has_place = False
        self._handed[successor] = name
        self._admit()

    @property
    def present(self) -> list[str]:
        """The members of the world of now that have not ended."""
        return [name for name in self.director.members if not self._members[name].is_gone]

    @property
    def running(self) -> list[str]:
        """All members whose processes have not ended."""
        return [name for name, member in self._members.items() if not member.is_gone]

    @property
    def lost(self) -> list[str]:
        """All members that were stopped for so long that the others went on without them."""
        return [name for name, member in self._members.items() if member.is_lost]

    @property
    def spares(self) -> list[str]:
        """Those that wait for a place, the first first."""
        return list(self._asking)

    async def wait(self, name: str) -> int:
        """Return the exit code of a member, when it has ended."""
        await asyncio.wait(self._members[name].tasks)
        return self.exits[name]

    def pid(self, name: str) -> int:
        """Return the number of a member's process."""
        return self._members[name].process.pid

    # -- processes -----------------------------------------------------------------------------------------------------

    async def _reap(self, name: str) -> None:
        member = self._members[name]
        code = await member.process.wait()
        member.is_gone, self.exits[name] = True, code
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._obey(self.director.lost(name, how, self._now()))
        self._hand_over(name)
        self._admit()
        await close_stream(member.writer)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for name, member in list(self._members.items()):
                if not member.is_gone:
                    self._look_at(name, member)
            self._obey(self.director.tick(self._now()))
            self._admit()

    def _look_at(self, name: str, member: _Member) -> None:
        try:
            is_stopped = psutil.Process(member.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return
        if not is_stopped:
            member.stopped_at = None
            return
        member.stopped_at = member.stopped_at or self._now()
        if not member.is_lost and self._now() - member.stopped_at > STOPPED_PATIENCE:
            self._lose(name, member)

    def _lose(self, name: str, member: _Member) -> None:
        """Hold a member for lost that is stopped; when it wakes, it hears so, whatever it waits for."""
        member.is_lost, member.has_place = True, False
        if name in self._asking:
            self._asking.remove(name)
        self._hand_over(name)
        self._obey([Evict(name, "it was stopped"), *self.director.lost(name, "is stopped", self._now())])

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- messages ------------------------------------------------------------------------------------------------------

    async def _serve(self, name: str, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(name, self._members[name], json.loads(line))

    def _hear(self, name: str, member: _Member, message: dict[str, Any]) -> None:
        now = self._now()
        match message["kind"]:
            case "donors":
                self._asking.append(name)
                self._admit()
            case "join":
                member.snapshots = message["address"]
                lineage = decode_lineage(message["lineage"])
                assert lineage is not None
                self._obey(self.director.arrive(name, lineage, now))
                self._hand_over(name)
            case "progress":
                lineage = decode_lineage(message["lineage"])
                assert lineage is not None
                self._obey(self.director.progress(name, lineage, now))
            case "report":
                lineage = decode_lineage(message["lineage"])
                assert lineage is not None
                report = MemberReport(
                    generation=message["generation"],
                    lineage=lineage,
                    prepared=decode_lineage(message["prepared"]),
                    suspects=tuple((rank, why) for rank, why in message["suspects"]),
                )
                self._obey(self.director.report(name, report, now))
            case "address":
                self._note_address(name, message["generation"], message["address"])
            case "withdraw":
                self._obey(self.director.withdraw(name, now))
                self._write([name], {"kind": "withdrawn"})
            case "depart" if self.present == [name]:
                self._write([name], {"kind": "refused"})
            case "depart":
                self.drain(name)
            case "lease":
                self._write([name], {"kind": "lease", "seconds": _LEASE_SECONDS if name in self.present else 0.0})
            case "differs":
                pass  # it ends now
            case "leave":
                self._obey(self.director.lost(name, "left", now))
            case kind:
                raise LaunchError(f"{name}: unknown kind {kind!r}")

    def _hand_over(self, successor: str) -> None:
        """Let the one leave whose place ``successor`` takes, which is there, or will not come."""
        leaving = self._handed.pop(successor, None)
        if leaving in self.present:
            self._obey(self.director.drain(leaving))

    def _admit(self) -> None:
        """Answer those who ask and have a place, or find one."""
        for name in list(self._asking):
            own = self._members[name]
            placed = sum(one.has_place and not one.is_gone for one in self._members.values())
            if self._places is None or own.has_place or placed < self._places:
                own.has_place = True
                self._asking.remove(name)
                self._tell_donors(name)

    def _tell_donors(self, name: str) -> None:
        self._asked += 1
        found = rotated([[other, self._members[other].snapshots] for other in self.present], self._asked)
        if self._places is not None and self.director.has_begun and self.director.have_all_left:
            self._write([name], {"kind": "drained"})
        elif self.director.has_begun and not found:
            self._write([name], {"kind": "evicted", "why": "all members have left", "is_over": True})
        else:
            self._write([name], {"kind": "donors", "donors": found})

    def _note_address(self, name: str, generation: int, address: str) -> None:
        if generation == self.director.generation:
            self._addresses[name] = address
            self._obey(self.director.ready(name, generation))

    def _obey(self, commands: Iterable[DirectorCommand]) -> None:
        for command in commands:
            match command:
                case RevokeWorld(generation, members, why, is_planned):
                    revoked = {"kind": "revoked", "generation": generation, "why": why, "planned": is_planned}
                    self._write(members, revoked)
                case AnnouncePending(generation, members):
                    self._write(members, {"kind": "pending", "generation": generation})
                case Evict(member, "drained"):
                    self._write([member], {"kind": "drained"})
                case Evict(member, why):
                    is_over = self.director.trouble is not None
                    self._write([member], {"kind": "evicted", "why": why, "is_over": is_over})
                case FormWorld():
                    self._form(command)
                case StartWorld(generation, members):
                    addresses = [self._addresses[member] for member in members]
                    self._write(members, {"kind": "members", "generation": generation, "members": addresses})

    def _form(self, formed: FormWorld) -> None:
        self.worlds.append((self._now(), formed))
        self._addresses.clear()
        hosts = [self._members[name].host for name in formed.members]
        for rank, name in enumerate(formed.members):
            message = {
                "kind": "world",
                "generation": formed.generation,
                "rank": rank,
                "hosts": hosts,
                "job": "elastic",
                "lineage": encode_lineage(formed.lineage),
                "decision": formed.decision,
                "joined": list(formed.change.joined),
                "left": list(formed.change.left),
                "why": formed.change.why,
                "is_by_loss": formed.change.is_by_loss,
            }
            self._write([name], message)

    def _write(self, members: Iterable[str], message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for name in members:
            writer = self._members[name].writer
            if not writer.is_closing():
                writer.write(line)
