"""Unauthenticated connections to gRPC servers are bounded, and peers get in all the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar.core.addresses import join_address
from asyncpar.net.transport import connection_watch, rpc, stranger_limits
from asyncpar.net.transport.connection_watch import WATCH, ConnectionWatch, ServerConnections, parse_peer
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.transport.stranger_limits import (
    MAX_PER_ADDRESS,
    MAX_STRANGERS,
    STRANGER_BYTES,
    STRANGER_SECONDS,
    STRANGERS_BYTES,
    Stranger,
    choose_evictions,
    server_limits,
)
from tests.core.test_descriptors import no_more_descriptors

CREDENTIALS = Credentials(b"s" * 32)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # and empty SETTINGS


def stranger(host: str, port: int, *, seconds: float = 0.0, received: int = 0) -> Stranger:
    return Stranger(peer=(host, port), seconds=seconds, received=received)


# -- the choice ------------------------------------------------------------------------------------------------------


def test_few_strangers_that_are_short_and_quiet_stay() -> None:
    crowd = [
        stranger("ab"[port % 2], port, seconds=STRANGER_SECONDS, received=1 << 13) for port in range(MAX_STRANGERS)
    ]
    assert choose_evictions(crowd, random.Random(1)) == []


def test_strangers_that_together_send_too_much_are_evicted_those_with_most_first() -> None:
    crowd = [stranger("a", port, received=port * STRANGERS_BYTES // 40) for port in range(1, 21)]
    evicted = choose_evictions(crowd, random.Random(1))
    assert evicted == [("a", port) for port in range(9, 21)]
    assert sum(one.received for one in crowd if one.peer not in evicted) <= STRANGERS_BYTES


def test_strangers_of_one_address_leave_places_for_others() -> None:
    crowd = [stranger("a", port) for port in range(MAX_STRANGERS)]
    evicted = choose_evictions(crowd, random.Random(1))
    assert len(crowd) - len(evicted) == MAX_PER_ADDRESS < MAX_STRANGERS


def test_who_stays_too_long_or_sends_too_much_is_evicted() -> None:
    crowd = [
        stranger("a", 1, seconds=STRANGER_SECONDS + 1),
        stranger("a", 2, received=STRANGER_BYTES + 1),
        stranger("a", 3),
    ]
    assert choose_evictions(crowd, random.Random(1)) == [("a", 1), ("a", 2)]


def test_a_flood_pushes_out_nobody_of_another_address() -> None:
    flood = [stranger("flood", port) for port in range(1000)]
    others = [stranger("peer", port) for port in range(20)]
    evicted = choose_evictions([*others, *flood], random.Random(1))
    assert Counter(host for host, _ in evicted) == {"flood": 1020 - MAX_STRANGERS}
    assert len(set(evicted)) == len(evicted)


def test_everybody_of_an_address_has_a_chance_to_stay() -> None:
    flood = [stranger("flood", port) for port in range(MAX_STRANGERS + 10)]
    dice = random.Random(1)
    evicted = {peer for _ in range(200) for peer in choose_evictions(flood, dice)}
    assert len(evicted) == len(flood)


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("ipv4:10.0.0.1:80", ("10.0.0.1", 80)),
        ("ipv6:%5B::1%5D:4000", ("::1", 4000)),
        ("ipv6:[::1]:4000", ("::1", 4000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", ("10.0.0.1", 5)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", ("fe80::1", 5)),
        ("unix:/tmp/x", None),
    ],
)
def test_a_peer_is_known_however_grpc_spells_it(peer: str, place: tuple[str, int] | None) -> None:
    assert parse_peer(peer) == place


# -- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def frequent_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watch look twenty times a second also while nothing is wrong."""
    monkeypatch.setattr(connection_watch, "CALM_SECONDS", 0.05)


@asynccontextmanager
async def serving(
    bind: str = "127.0.0.1", add: Callable[[grpc.aio.Server], object] | None = None
) -> AsyncIterator[tuple[RpcServer, ServerConnections]]:
    server = RpcServer(CREDENTIALS, bind=bind)
    if add is not None:
        add(server.server)
    await server.start()
    assert server._connections is not None  # noqa: SLF001  # the server makes the list of its connections itself and hands it to nobody
    try:
        yield server, server._connections  # noqa: SLF001  # the server makes the list of its connections itself and hands it to nobody
    finally:
        await server.stop(grace=0)


async def check(channel: grpc.aio.Channel) -> None:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def few_connections(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Allow servers that start now so many connections."""

    def limits(descriptors: int, _others: int) -> list[tuple[str, int]]:
        return [*(dict(server_limits(descriptors)) | {"grpc.max_allowed_incoming_connections": count}).items()]

    monkeypatch.setattr(rpc, "server_limits", limits)


@contextlib.contextmanager
def knocking(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open ``count`` connections that speak HTTP/2 and then say nothing."""
    with contextlib.ExitStack() as sockets:
        strangers = []
        for _ in range(count):
            sock = sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):  # turned away already
                sock.sendall(PREFACE)
            strangers.append(sock)
        yield strangers


async def test_strangers_that_hold_every_connection_keep_no_peer_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few_connections(monkeypatch, 100)
    async with serving() as (server, connections):
        with caplog.at_level(logging.WARNING, "asyncpar"), knocking(server.port, 150):
            async with asyncio.timeout(30), open_channel(server.address, CREDENTIALS) as channel:
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await check(channel)
                        break
                    await asyncio.sleep(0.05)
        assert connections.evicted > 0  # how many depends on when gRPC accepts: fewer are there at a look than may be
    assert f"port {server.port}: closed" in caplog.text


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0", "::1", "::"])
async def test_only_a_connection_without_an_accepted_call_is_closed(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger_limits, "STRANGER_SECONDS", 0.1)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    async with (
        serving(bind) as (server, connections),
        open_channel(join_address(host, server.port), CREDENTIALS) as channel,
    ):
        await check(channel)
        (peer,) = connections._accepted  # noqa: SLF001  # which connections are known is no statistic: only those put out are counted
        reader, writer = await asyncio.open_connection(host, server.port)
        writer.write(PREFACE)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
        writer.close()
        assert connections.evicted == 1
        assert set(connections._accepted) == {peer}  # noqa: SLF001  # which connections are known is no statistic: only those put out are counted
        await check(channel)
        assert set(connections._accepted) == {peer}, "the same connection served the second call"  # noqa: SLF001  # which connections are known is no statistic: only those put out are counted


async def test_a_peer_whose_call_is_accepted_while_strangers_are_counted_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread may be late: large messages that follow the call arrive before it reads how much has arrived."""
    async with serving() as (server, connections), asyncio.timeout(30):
        overtaken: list[int] = []

        def read_late(sock: socket.socket) -> int:
            port = sock.getpeername()[1]
            connections.accept(f"ipv4:127.0.0.1:{port}")
            overtaken.append(port)
            return 2 * STRANGER_BYTES

        monkeypatch.setattr(connection_watch, "_bytes_received", read_late)
        with knocking(server.port, 1) as [sock]:
            for _ in range(3000):
                if overtaken and not connections.open_strangers:
                    break
                await asyncio.sleep(0.01)
            assert overtaken == [sock.getsockname()[1]]
            assert connections.evicted == 0


async def test_strangers_are_closed_although_the_process_can_open_nothing_any_more() -> None:
    async with serving() as (server, connections), asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE)
        await reader.readexactly(1)  # gRPC has the connection
        with no_more_descriptors():
            writer.write(b"\0\0\0\x04\0\0\0\0\0" * (STRANGER_BYTES // 9 + 1))
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
        writer.close()
        assert connections.evicted == 1


async def test_a_refused_call_makes_no_connection_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger_limits, "STRANGER_SECONDS", 0.1)
    async with serving() as (server, connections):
        async with open_channel(server.address, Credentials(b"x" * 32)) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="no valid token"):
                await check(channel)
            async with asyncio.timeout(30):
                while connections.evicted == 0:  # noqa: ASYNC110 - a thread counts
                    await asyncio.sleep(0.02)
        assert connections._accepted == {}  # noqa: SLF001  # which connections are known is no statistic: only those put out are counted


async def test_a_peer_that_calls_while_the_server_starts_is_known() -> None:
    """A stream that begins then may be the only call of its connection for ever: agents have one."""
    server = RpcServer(CREDENTIALS)
    add_echoes(server.server)
    start = server.server.start
    async with contextlib.AsyncExitStack() as stack:

        async def start_and_be_called() -> None:
            await start()
            channel: Any = await stack.enter_async_context(open_channel(server.address, CREDENTIALS, adds_token=False))
            call = channel.stream_stream("/test.Echo/both")(metadata=CREDENTIALS.metadata())
            await call.write(b"ab")
            assert await call.read() == b"ab"

        server.server.start = start_and_be_called  # type: ignore[method-assign]  # an early peer
        async with asyncio.timeout(30):
            await server.start()
        assert server._connections is not None  # noqa: SLF001  # see ``serving``
        assert len(server._connections._accepted) == 1  # noqa: SLF001  # which connections are known is no statistic: only those put out are counted
    await server.stop(grace=0)


async def test_a_connection_from_the_port_of_one_that_has_closed_is_known() -> None:
    connections = ServerConnections(4000, asyncio.get_running_loop())
    connections.accept("ipv4:10.0.0.1:80")
    looked_at = time.monotonic()
    connections.accept("ipv4:10.0.0.1:80")  # another one, after the first was seen to be closed
    connections.forget_closed(set(), before=looked_at)
    assert connections.is_accepted(("10.0.0.1", 80))


async def test_a_peer_that_waits_for_a_blocked_event_loop_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger_limits, "STRANGER_SECONDS", 0.3)
    async with serving() as (server, connections):
        with knocking(server.port, 1):
            time.sleep(1.0)  # noqa: ASYNC251  # as a program that computes on the event loop
            assert connections.open_strangers == 1, "it is seen"
            assert connections.evicted == 0, "it could not make a call"
            async with asyncio.timeout(30):
                while connections.evicted == 0:  # noqa: ASYNC110 - a thread counts
                    await asyncio.sleep(0.02)


async def test_the_time_in_which_a_process_is_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_watch, "CALM_SECONDS", 3600.0)  # this test looks by itself
    monkeypatch.setattr(connection_watch, "BUSY_SECONDS", 3600.0)
    watch = ConnectionWatch(random.Random(1))
    async with serving() as (server, _):
        with knocking(server.port, 1):
            connections = watch.register(server.port)
            monkeypatch.setattr(connection_watch, "CALM_SECONDS", 0.5)
            now = time.monotonic()
            for seconds in (0.0, 0.05, 100.0, 100.05, 200.0):
                await asyncio.sleep(0.02)
                watch._look(now + seconds)  # noqa: SLF001  # a look has no other door
            assert connections.open_strangers == 1
            assert connections.evicted == 0
            watch.unregister(connections)


def test_memory_of_a_flood_is_given_back_while_it_lasts_and_after_grpc_has_freed_what_it_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap = connection_watch._Heap()  # noqa: SLF001  # the watch gives memory back by itself, whenever it looks
    now, trims = 0.0, list[float]()
    monkeypatch.setattr(connection_watch, "give_back_free_memory", lambda: trims.append(now))

    def look_until(end: float, *, is_flood: bool) -> list[float]:
        nonlocal now
        trims.clear()
        while now < end:
            heap.look(is_flood=is_flood, now=now)
            now += 0.125
        return trims

    assert look_until(10.0, is_flood=False) == []
    assert look_until(12.0, is_flood=True) == [10.0, 10.5, 11.0, 11.5]
    assert look_until(100.0, is_flood=False) == [12.0, 13.0, 15.0, 19.0, 27.0, 43.0]
    assert look_until(101.0, is_flood=True) == [100.0, 100.5]


def frame(kind: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + struct.pack(">I", stream) + payload


async def test_a_header_block_without_an_end_is_ended() -> None:
    """A flood of CONTINUATION frames (CVE-2024-27316 is one of its kind) is not parsed for ever."""
    async with serving() as (server, connections):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        header = b"\x00\x04habc\x5a" + b"v" * 90
        writer.write(PREFACE + frame(1, 1, header))
        block = frame(9, 1, header * 160)
        async with asyncio.timeout(30):
            while connections.open_strangers or not connections.evicted:
                if writer.transport.get_write_buffer_size() < len(block):
                    writer.write(block)
                await asyncio.sleep(0)
        writer.transport.abort()
        assert connections.evicted == 1


async def test_what_closed_is_forgotten() -> None:
    async with serving() as (server, connections):
        for _ in range(3):
            async with open_channel(server.address, CREDENTIALS) as channel:
                await check(channel)
        async with asyncio.timeout(30):
            while connections._accepted:  # noqa: ASYNC110, SLF001  # a thread forgets; which connections are known is no statistic: only those put out are counted
                await asyncio.sleep(0.05)


async def test_the_thread_ends_with_the_last_server() -> None:
    async with serving(), serving():
        thread = WATCH._thread  # noqa: SLF001  # the thread of the watch is shared by all servers and shown by none
        assert thread is not None
        assert thread.is_alive()
    assert not thread.is_alive() or WATCH._servers  # noqa: SLF001  # another test's server may keep the thread alive


# -- services of every kind ------------------------------------------------------------------------------------------


def add_echoes(server: grpc.aio.Server) -> None:
    """Add a service with a method of every kind that grpc.aio can serve."""

    async def unary(request: bytes, context: Any) -> bytes:
        return request

    def plain(request: bytes, context: Any) -> bytes:
        return request

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        yield request

    def plain_stream(request: bytes, context: Any) -> Iterator[bytes]:
        yield request
        yield request

    async def written_stream(request: bytes, context: Any) -> None:
        await context.write(request)
        await context.write(request)

    async def gather(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def both(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    handlers: dict[str, Any] = {
        "unary": grpc.unary_unary_rpc_method_handler(unary),
        "plain": grpc.unary_unary_rpc_method_handler(plain),
        "stream": grpc.unary_stream_rpc_method_handler(stream),
        "plain_stream": grpc.unary_stream_rpc_method_handler(plain_stream),
        "written_stream": grpc.unary_stream_rpc_method_handler(written_stream),
        "gather": grpc.stream_unary_rpc_method_handler(gather),
        "both": grpc.stream_stream_rpc_method_handler(both),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("unary", b"ab"),
        ("plain", b"ab"),
        ("stream", [b"ab", b"ab"]),
        ("plain_stream", [b"ab", b"ab"]),
        ("written_stream", [b"ab", b"ab"]),
        ("gather", b"abc"),
        ("both", [b"ab", b"c"]),
    ],
)
async def test_a_call_of_any_kind_makes_its_connection_known(method: str, answer: object) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"

    async with (
        serving(add=add_echoes) as (server, connections),
        asyncio.timeout(30),
        open_channel(server.address, CREDENTIALS, adds_token=False) as channel,
    ):
        path, metadata = f"/test.Echo/{method}", CREDENTIALS.metadata()
        raw: Any = channel  # its stubs want serializers that it does not
        got: object
        if method in ("unary", "plain"):
            got = await raw.unary_unary(path)(b"ab", metadata=metadata)
        elif method == "gather":
            got = await raw.stream_unary(path)(requests(), metadata=metadata)
        elif method == "both":
            got = [part async for part in raw.stream_stream(path)(requests(), metadata=metadata)]
        else:
            got = [part async for part in raw.unary_stream(path)(b"ab", metadata=metadata)]
        assert got == answer
        assert len(connections._accepted) == 1  # noqa: SLF001  # which connections are known is no statistic: only those put out are counted
