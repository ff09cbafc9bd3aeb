"""Ranks with real servers on this machine, which link to each other as those of different processes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerLost
from asyncpar.net.transport.links import Links
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.net.wire.frame import Key

CREDENTIALS = Credentials(b"s" * 32)


@dataclass
class Rank:
    server: RpcServer
    connector: GrpcConnector
    links: Links

    def join(self) -> None:
        self.connector.join(self.links)

    async def stop(self) -> None:
        """Leave, as a node does."""
        await self.links.close()
        await self.connector.stop()
        await self.server.stop(grace=0)


@asynccontextmanager
async def serving(
    transport: str | None = None,
    credentials: Credentials | None = CREDENTIALS,
    connections: int = 1,
    link_timeout: float = LINK_SECONDS,
) -> AsyncIterator[tuple[RpcServer, GrpcConnector]]:
    server = RpcServer(credentials, link_timeout=link_timeout)
    connector = GrpcConnector(
        credentials=credentials, transport=transport, connections=connections, link_timeout=link_timeout
    )
    connector.register(server)
    await server.start()
    try:
        await connector.start()
        yield server, connector
    finally:
        await connector.stop()
        await server.stop(grace=0)


@asynccontextmanager
async def open_world(
    *transports: str | None,
    credentials: list[Credentials] | None = None,
    generations: list[int] | None = None,
    hosts: str | None = None,
    connections: tuple[int, ...] | None = None,
    job: str = "local",
    link_timeout: float = LINK_SECONDS,
) -> AsyncIterator[list[Rank]]:
    """One rank per transport pin, on the host of its letter in ``hosts`` (None: all on one); nobody has joined yet."""
    async with AsyncExitStack() as stack:
        ends = []
        for rank, transport in enumerate(transports):
            own = CREDENTIALS if credentials is None else credentials[rank]
            count = 1 if connections is None else connections[rank]
            ends.append(await stack.enter_async_context(serving(transport, own, count, link_timeout)))
        places = "a" * len(ends) if hosts is None else hosts
        members = tuple(
            Member(rank=rank, host=f"host-{place}", host_id=place, address=server.address)
            for rank, (place, (server, _)) in enumerate(zip(places, ends, strict=True))
        )
        ranks = []
        for rank, (server, connector) in enumerate(ends):
            generation = 0 if generations is None else generations[rank]
            world = World(members=members, generation=generation, job=job)
            links = await stack.enter_async_context(Links(world=world, rank=rank, connector=connector))
            ranks.append(Rank(server, connector, links))
        yield ranks


async def exchange(one: Links, other: Links, *, sequence: int = 0, length: int = 100_000) -> None:
    """Send a payload both ways at once, which makes both sides dial at once if the link is new."""
    payload = bytes(range(256)) * (length // 256 + 1)
    key = Key(1, sequence, 0)
    buffers = bytearray(length), bytearray(length)
    waiters = (
        one.link(other.rank).post(key, 0, memoryview(buffers[0])),
        other.link(one.rank).post(key, 0, memoryview(buffers[1])),
    )
    sendings = [
        sender.link(receiver.rank).send(key, 0, memoryview(payload)[:length])
        for sender, receiver in ((one, other), (other, one))
    ]
    async with asyncio.timeout(30):
        for waiter in waiters:
            if waiter is not None:
                await waiter
        for sending in sendings:
            if sending is not None:
                await sending.done
    assert buffers[0] == buffers[1] == payload[:length]


async def loss(links: Links, rank: int) -> PeerLost:
    """Try to reach ``rank`` and return the error that comes of it."""

    async def receive() -> None:
        waiter = links.link(rank).post(Key(1, 0, 0), 0, memoryview(bytearray(1)))
        assert waiter is not None
        await waiter

    async with asyncio.timeout(30):
        with pytest.raises(PeerLost) as caught:
            await receive()
    return caught.value
