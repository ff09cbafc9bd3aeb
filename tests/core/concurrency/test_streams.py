"""Streams end without a word of asyncio, however their connections end."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import asyncpar
from asyncpar.core.concurrency import streams
from asyncpar.core.concurrency.streams import close_stream

MAKES_STREAMS = re.compile(
    r"(?<!def )\b(?:open_connection|open_unix_connection|start_server|start_unix_server|serve_streams)\("
)


async def read_all(reader: asyncio.StreamReader) -> None:
    with pytest.raises(ConnectionResetError):
        await reader.read()


@pytest.mark.parametrize("times", range(3))
async def test_a_connection_that_was_reset_is_closed_without_a_word(times: int) -> None:
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    here, there = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=here)
    reading = asyncio.create_task(read_all(reader))
    writer.write(b"x" * (times + 1))
    await writer.drain()
    there.close()  # with bytes that it has not read: a reset
    await reading
    await close_stream(writer)
    del reader, writer, reading
    gc.collect()
    await asyncio.sleep(0)
    assert contexts == []


async def test_a_peer_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FLUSH_SECONDS", 0.01)
    here, there = socket.socketpair()
    with there:
        _, writer = await asyncio.open_connection(sock=here)
        writer.write(bytes(16 << 20))
        there.setblocking(False)
        async with asyncio.timeout(10):
            await close_stream(writer)
            while await asyncio.get_running_loop().sock_recv(there, 1 << 20):
                pass


def test_who_makes_streams_closes_them_so() -> None:
    package = Path(asyncpar.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    made = {path: text for path, text in sources.items() if "asyncio" in text and MAKES_STREAMS.search(text)}
    assert len(made) >= 9
    assert [path for path, text in made.items() if "close_stream" not in text] == []
    assert [path for path, text in sources.items() if re.search(r"\bwriter\.close\b", text)] == [
        package / "core" / "concurrency" / "streams.py"
    ]
