"""Connections between agents over gRPC: what was sent before the end of one arrives, as far as there is anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.hosts import network
from asyncpar.hosts.messages import HostLeaving
from asyncpar.hosts.network import GroupPeer, RpcGroupNetwork
from asyncpar.net.transport.rpc import Credentials, RpcServer

CREDENTIALS = Credentials(bytes(range(32)))
LARGE = "x" * (1 << 20)


@asynccontextmanager
async def agent() -> AsyncIterator[tuple[str, list[object]]]:
    """Serve as the agent ``there``; yield its address, and what it is told."""
    server, taken = RpcServer(CREDENTIALS), list[object]()
    network = RpcGroupNetwork(server, CREDENTIALS)
    network.serve("there", lambda _sender, _address, message: taken.append(message), answer_nobody)
    await server.start()
    try:
        yield server.address, taken
    finally:
        await server.stop(grace=0.0)


async def answer_nobody(_: pb.EnterRequest) -> pb.EnterReply:
    raise AssertionError("nobody comes")


def connect(address: str, up: asyncio.Event | None = None) -> GroupPeer:
    on_up = asyncio.Event() if up is None else up
    return GroupPeer(
        ("here", "h:1"), "there", address, CREDENTIALS, on_up=lambda _: on_up.set(), on_down=lambda _node, _gone: None
    )


@pytest.mark.parametrize("count", [1, 12])
async def test_what_was_sent_before_a_connection_is_closed_arrives(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A host that leaves decides that alone where it is the first of two voters: the other one has to learn it."""
    monkeypatch.setattr(network, "_CLOSE_SECONDS", 30.0)
    async with asyncio.timeout(60), agent() as (address, taken):
        up = asyncio.Event()
        peer = connect(address, up)
        await up.wait()
        sent = [HostLeaving(f"{number}{LARGE}") for number in range(count)]
        for message in sent:
            peer.send(message)
        await peer.close()
        assert taken == sent


async def test_a_connection_that_nobody_answers_is_closed_soon() -> None:
    async with asyncio.timeout(60):
        peer = connect("127.0.0.1:1")
        peer.send(HostLeaving("here"))
        await peer.close()
