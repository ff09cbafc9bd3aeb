"""Hosts of a job with a fixed number of them, for tests: they attend a first one, and keep what it commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.hosts.first_host import FirstHost, Introduction
from asyncpar.hosts.further_host import FurtherHost
from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.messages import (
    HostCommand,
    JobOpened,
    MemberArrived,
    MemberNotice,
    MemberReady,
    WorldAnnounced,
    WorldTerms,
)
from asyncpar.net.transport.rpc import Credentials, RpcServer

Kind = TypeVar("Kind")
SECRET = Credentials(b"s" * 32)


def introduction(
    host: str, place: int | None = None, *, nnodes: int = 2, job: str = "j", version: str = "1"
) -> Introduction:
    return Introduction(job=job, nnodes=nnodes, node_rank=place, host=host, version=version)


def opened(nnodes: int = 2, *, wait_within: float | None = None) -> JobOpened:
    terms = WorldTerms(least_hosts=nnodes, most_hosts=nnodes, members=1, last_call=0.0, wait_within=wait_within)
    return JobOpened(number=1, terms=terms, record=b"the job")


def arrived(host: str) -> MemberArrived:
    return MemberArrived(member=f"{host}/all", host=host, lineage=Lineage(0, b""))


def notice(host: str, number: int, *, generation: int = 0) -> MemberNotice:
    """Return a notice that no other one supersedes."""
    return MemberNotice(
        member=f"{host}/all", generation=generation, name=f"notice {number}", number=number, content=b"%d" % number
    )


@dataclass
class Commanded:
    """What the agent of a host is commanded, and the error that ends it."""

    group: FirstHost | FurtherHost
    commands: list[HostCommand] = field(default_factory=list)
    error: Exception | None = None
    printed: list[str] = field(default_factory=list)
    _reading: asyncio.Task[None] | None = None

    def read(self) -> Commanded:
        self._reading = asyncio.ensure_future(self._read())
        return self

    async def _read(self) -> None:
        try:
            async for command in self.group.commands:
                self.commands.append(command)
                if isinstance(command, WorldAnnounced):
                    mine = next(one.name for one in command.members if one.name.partition("/")[0] in self.group.name)
                    self.group.report(MemberReady(mine, command.generation, ""))
        except Exception as error:  # noqa: BLE001  # kept for the test
            self.error = error

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [command for command in self.commands if isinstance(command, kind)]

    async def close(self) -> None:
        await self.group.stop()
        if self._reading is not None:
            with suppress(asyncio.CancelledError):
                await self._reading


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30.0):
        while not is_so():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def first_host(
    own: Introduction, *, reconnect: float = 5.0, credentials: Credentials = SECRET
) -> AsyncIterator[tuple[Commanded, str]]:
    """Serve the first host, and yield what it commands its own agent, and its address."""
    server = RpcServer(credentials)
    group = FirstHost(own, reconnect=reconnect)
    membership_pb2_grpc.add_FirstHostServicer_to_server(group, server.server)  # type: ignore[no-untyped-call]
    server.on_refused = group.refused
    await server.start()
    commanded = Commanded(group).read()
    try:
        yield commanded, server.address
    finally:
        await commanded.close()
        await server.stop(grace=0)


@asynccontextmanager
async def further_host(
    own: Introduction,
    address: str,
    *,
    reconnect: float = 5.0,
    timeout: float = 10.0,
    credentials: Credentials = SECRET,
) -> AsyncIterator[Commanded]:
    """Attend the first host at ``address``; requests for views are answered with their own content."""

    async def answer(content: bytes) -> bytes:
        return own.host.encode() + content

    printed: list[str] = []
    group = FurtherHost(
        own,
        address,
        credentials,
        timeout=timeout,
        reconnect=reconnect,
        adopt=lambda opened: opened,
        lost=str.encode,
        answer=answer,
        report=printed.append,
    )
    commanded = Commanded(group, printed=printed).read()
    try:
        yield commanded
    finally:
        await commanded.close()
