"""Those who connect and are none of us: they learn nothing, do not stay, and keep nobody out."""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import replace

import numpy as np
import pytest

from asyncpar.core.addresses import split_address
from asyncpar.errors import AuthenticationError
from asyncpar.net.transport import handshaking
from asyncpar.net.transport.connect import TcpListener
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.hostile.doors import OVER, Door, open_door, read_all, say
from tests.net.transport.pairs import SECRET, TERMS

OPENINGS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "post": b"POST /asyncpar.v1.Link/Open HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + bytes(5000),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\xff\xff\xff\xff\xff\xff",
    "http2 garbage": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.Random(1).randbytes(4000),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "random": random.Random(2).randbytes(100_000),
    "zeros": bytes(100_000),
    "our magic": b"apLK" + random.Random(3).randbytes(5000),
    "a frame": b"ap\x01\x01" + bytes(36),
}
KINDS = ("tcp", "unix")


def hello(nonce: bytes = b"n" * NONCE_BYTES) -> bytes:
    """Return a first message that shows the secret."""
    return Handshake.dial(TERMS, secret=SECRET, nonce=nonce).opening


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS.keys())
async def test_a_lane_listener_closes_without_a_byte_and_goes_on(kind: str, opening: bytes) -> None:
    async with open_door(kind) as door:
        with door.knock() as stranger:
            await say(stranger, opening)
            assert await read_all(stranger) == b""
        assert isinstance(door.refused[0], AuthenticationError)
        assert (door.porter.strangers, door.porter.guests, len(door.refused)) == (0, 0, 1)
        await door.let_in()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [0, 1, 4, 60])
async def test_who_says_too_little_is_turned_away_in_time(
    kind: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshaking, "STRANGER_SECONDS", 0.05)
    async with open_door(kind) as door:
        with door.knock() as stranger:
            await asyncio.get_running_loop().sock_sendall(stranger, hello()[:said])
            assert await read_all(stranger) == b""
        assert isinstance(door.refused[0], TimeoutError)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_says_a_byte_now_and_then_gets_no_more_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshaking, "STRANGER_SECONDS", 0.1)
    loop = asyncio.get_running_loop()
    async with open_door(kind) as door:
        with door.knock() as stranger:
            told = 0
            ending = asyncio.create_task(read_all(stranger))
            for byte in hello()[:100]:
                await asyncio.wait({ending}, timeout=0.005)
                try:
                    await loop.sock_sendall(stranger, bytes([byte]))
                except (BrokenPipeError, ConnectionResetError):
                    break
                told += 1
            assert await ending == b""
            assert told < 100


@pytest.mark.parametrize("kind", KINDS)
async def test_who_shows_the_secret_and_then_nothing_is_turned_away_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshaking, "PEER_SECONDS", 0.05)
    async with open_door(kind) as door:
        with door.knock() as stranger:
            await asyncio.get_running_loop().sock_sendall(stranger, hello())
            assert len(await read_all(stranger)) == 64
        assert isinstance(door.refused[0], TimeoutError)
        await door.let_in()


@pytest.mark.parametrize("kind", KINDS)
async def test_strangers_push_nobody_out_who_has_shown_the_secret(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshaking, "MAX_STRANGERS", 4)
    loop = asyncio.get_running_loop()
    async with open_door(kind) as door:
        handshake = Handshake.dial(TERMS, secret=SECRET, nonce=b"n" * NONCE_BYTES)
        with door.knock() as guest:
            await loop.sock_sendall(guest, handshake.opening)
            challenge = await loop.sock_recv(guest, 64)
            strangers = [door.knock() for _ in range(40)]
            async with asyncio.timeout(30):
                while len(door.refused) < 36:  # noqa: ASYNC110 - no event tells of connections
                    await asyncio.sleep(0)
            assert (door.porter.strangers, door.porter.guests) == (4, 1)
            place = handshake.buffer()
            place[:] = challenge
            await loop.sock_sendall(guest, handshake.advance(len(challenge)))
            async with asyncio.timeout(30):
                (await door.lanes.get()).abort(OVER)
            for stranger in strangers:
                stranger.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flood_of_strangers_keeps_no_peer_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer finds the door full, and strangers keep coming while it shakes hands."""
    monkeypatch.setattr(handshaking, "MAX_STRANGERS", 16)
    async with open_door(kind) as door:
        sockets = [door.knock() for _ in range(16)]
        flood = asyncio.create_task(_flood(door, sockets))
        try:
            for _ in range(10):
                await door.let_in()
        finally:
            flood.cancel()
            await asyncio.wait({flood})
            for stranger in sockets:
                stranger.close()
        assert door.porter.strangers <= 16
        assert len(sockets) > 16


async def _flood(door: Door, sockets: list[socket.socket]) -> None:
    while True:
        sockets += [door.knock(), door.knock()]
        await asyncio.sleep(0.001)


async def _meet(door: Door) -> socket.socket:
    """Return the other end of a connection that ``door`` has accepted."""
    here, there = socket.socketpair()
    here.setblocking(False)
    await asyncio.get_running_loop().create_connection(door.porter.greet, sock=there)
    return here


async def test_who_shows_the_secret_before_it_is_heard_is_not_pushed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshaking, "MAX_STRANGERS", 1)
    async with open_door("unix") as door:
        here, there = socket.socketpair()
        here.send(hello())
        protocol = door.porter.greet()
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=there)
        strangers = [here, *[await _meet(door) for _ in range(5)]]
        assert (door.porter.strangers, door.porter.guests) == (1, 1)
        slow, there = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(door.porter.greet, sock=there)
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # as if the loop were too busy to read
        slow.send(hello())
        strangers += [slow, *[await _meet(door) for _ in range(5)]]
        assert (door.porter.strangers, door.porter.guests) == (1, 1), "guests are as few as strangers"
        assert len(door.refused) >= 10
        for stranger in strangers:
            stranger.close()


async def test_strangers_that_were_accepted_as_the_door_closed_are_turned_away() -> None:
    async with open_door("unix") as door:
        late = door.porter.greet()
        door.porter.turn_away()
        one, other = socket.socketpair()
        one.setblocking(False)
        with one:
            _, protocol = await asyncio.get_running_loop().create_connection(lambda: late, sock=other)
            assert await read_all(one) == b""
        assert isinstance(protocol.lane.exception(), ConnectionResetError)


# -- a whole node ----------------------------------------------------------------------------------------------------


async def check_works(nodes: tuple[Node, ...]) -> None:
    """All nodes reduce, and the result is right."""
    arrays = [np.full(1000, node.rank + 1, np.float32) for node in nodes]
    async with asyncio.timeout(30):
        await asyncio.gather(*(node.world.all_reduce(array) for node, array in zip(nodes, arrays, strict=True)))
    assert all((array == sum(range(1, len(nodes) + 1))).all() for array in arrays)


@pytest.mark.parametrize("first", ["strangers", "links"])
async def test_a_node_goes_on_whatever_is_said_to_its_grpc_port(first: str) -> None:
    async with local_world(2, transport="grpc") as nodes:
        if first == "links":
            await check_works(nodes)
        host, port = split_address(nodes[0].address)
        strangers = []
        for opening in (*OPENINGS.values(), b""):
            stranger = socket.create_connection((host, port))
            stranger.setblocking(False)
            strangers.append(stranger)
            await say(stranger, opening)
        await check_works(nodes)
        for name, stranger in zip(OPENINGS, strangers, strict=False):
            if not name.startswith("http2"):  # those are HTTP/2 up to their end, and have their time limit
                await read_all(stranger)  # to its end: it was closed
            stranger.close()
        strangers[-1].close()
        await check_works(nodes)


def lane_port(node: Node) -> int:
    """Return the port of a node's TCP lanes."""
    connector = node._bootstrap.connector  # noqa: SLF001  # a node shows no connector: its ports are found by peers alone
    assert isinstance(connector, GrpcConnector)
    listener = connector._acceptor._listeners["tcp"]  # noqa: SLF001  # a stranger needs the port of the lane, which only peers are told
    assert isinstance(listener, TcpListener)
    return listener.port


async def test_two_hundred_half_open_connections_to_every_port_change_nothing() -> None:
    async with local_world(3, transport="tcp") as nodes:
        crowd = []
        for node in nodes:
            for port in (lane_port(node), split_address(node.address)[1]):
                for _ in range(200):
                    sock = socket.socket()
                    sock.setblocking(False)
                    sock.connect_ex(("127.0.0.1", port))
                    crowd.append(sock)
        try:
            for _ in range(5):
                await check_works(nodes)
            for node in nodes:
                connector = node._bootstrap.connector  # noqa: SLF001  # a node shows no connector: its ports are found by peers alone
                assert isinstance(connector, GrpcConnector)
                listener = connector._acceptor._listeners["tcp"]  # noqa: SLF001  # a stranger needs the port of the lane, which only peers are told
                assert isinstance(listener, TcpListener)
                assert listener._porter.strangers <= handshaking.MAX_STRANGERS  # noqa: SLF001  # strangers that wait at the door are counted nowhere else
        finally:
            for sock in crowd:
                sock.close()
        await check_works(nodes)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_of_another_rank_job_or_generation_is_a_stranger_although_it_holds_the_secret(kind: str) -> None:
    others = (
        replace(TERMS, dialer=2),
        replace(TERMS, listener=1),
        replace(TERMS, job="b"),
        replace(TERMS, generation=4),
    )
    async with open_door(kind) as door:
        for terms in others:
            with pytest.raises(ConnectionResetError):
                await door.dial(terms)
        assert door.lanes.empty()
        assert all(isinstance(error, AuthenticationError) for error in door.refused)
        await door.let_in()
