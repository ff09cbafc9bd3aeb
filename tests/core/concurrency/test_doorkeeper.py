"""Strangers at a listening socket of a loop are bounded in number and time; who is trusted stays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncpar.core.concurrency import doorkeeper
from asyncpar.core.concurrency.doorkeeper import Doorkeeper, PendingConnections, serve_streams
from asyncpar.core.concurrency.streams import close_stream

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@asynccontextmanager
async def echoing(keeper: Doorkeeper, made: list[Echo]) -> AsyncIterator[int]:
    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    server = await asyncio.get_running_loop().create_server(keeper.before(make), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def is_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    try:
        writer.write(b"x")
        return await reader.read(1) == b"x"
    except ConnectionError:
        return False


async def connect(port: int, count: int) -> list[Ends]:
    return [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]


async def close(ends: list[Ends]) -> None:
    for _, writer in ends:
        with contextlib.suppress(ConnectionError):
            await close_stream(writer)


async def test_as_many_stay_as_there_are_places_for_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorkeeper, "MAX_STRANGERS", 4)
    monkeypatch.setattr(doorkeeper, "MAX_PER_ADDRESS", 3)
    keeper = Doorkeeper(dice=random.Random(1))
    async with asyncio.timeout(30), echoing(keeper, []) as port:
        ends = await connect(port, 10)
        assert sum([await is_open(*end) for end in ends]) == keeper.strangers == 3
        assert keeper.refused == 7
        await close(ends)


async def test_who_is_trusted_is_neither_pushed_out_nor_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorkeeper, "MAX_STRANGERS", 4)
    keeper, made = Doorkeeper(seconds=0.05), list[Echo]()
    async with asyncio.timeout(30), echoing(keeper, made) as port:
        known = await connect(port, 1)
        assert await is_open(*known[0])
        keeper.trust(made[0]._transport)  # noqa: SLF001 - a field of this test
        strangers = await connect(port, 10)
        for reader, _ in strangers:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert await is_open(*known[0])
        assert keeper.strangers == 0
        await close([*known, *strangers])


async def test_nobody_takes_a_descriptor_that_the_process_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Echo]()
    monkeypatch.setattr(doorkeeper, "is_reserved", lambda _: True)
    async with asyncio.timeout(30), echoing(Doorkeeper(), made) as port:
        ends = await connect(port, 1)
        assert not await is_open(*ends[0])
        assert made == []
        await close(ends)


async def test_streams_are_served_and_cut_off_in_time() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await reader.readline())
            await reader.read()
        finally:
            await close_stream(writer)

    server = await serve_streams(serve, host="127.0.0.1", seconds=0.1)
    async with asyncio.timeout(30), server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await close_stream(writer)


def test_a_program_that_ends_while_it_serves_is_silent() -> None:
    """``asyncio.start_server`` of Python 3.11 complains of a ``CancelledError`` in a ``StreamReaderProtocol``."""
    contexts = list[object]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        begun = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begun.set()
            try:
                await reader.read()
            finally:
                writer.close()

        server = await serve_streams(serve, host="127.0.0.1")
        _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        await begun.wait()
        writer.close()
        server.close()

    asyncio.run(main())
    assert contexts == []


def test_a_flood_from_one_address_pushes_out_nobody_of_another() -> None:
    pending = PendingConnections[str](random.Random(1))
    for number in range(3):
        assert pending.enter(f"peer {number}", limit=8, address="peer", per_address=6) is None
    for number in range(100):
        pushed = pending.enter(f"flood {number}", limit=8, address="flood", per_address=6)
        assert pushed is None or pushed.startswith("flood")
    assert len([who for who in pending if who.startswith("peer")]) == 3
    assert len(pending) == 8
