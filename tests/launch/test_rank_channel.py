"""The agent's line to the observer of a rank."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from asyncpar.launch.host_watch import RankChannel


@pytest.fixture
def _frequent_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # hundreds of collections need not look through what earlier tests and modules keep; see conftest.py
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("_frequent_collections")
async def test_ranks_that_end_at_any_moment_leave_no_error_that_nobody_retrieves(seed: int) -> None:
    """The order in which the collector ends objects decides whether asyncio tells of a connection's error."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    chance = random.Random(seed)
    for _ in range(300):
        gc.set_threshold(chance.randint(1, 60), 2, 2)
        here, there = socket.socketpair()
        channel = RankChannel(here)
        asking = asyncio.create_task(channel.ask("look", within=10.0))
        for _ in range(chance.randint(3, 10)):
            await asyncio.sleep(0)
        there.close()  # with a question that was not read: a reset
        for _ in range(chance.randint(0, 4)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            assert await asking is None
        await channel.close()
        assert await asking is None
        del channel, asking
        if chance.random() < 0.5:
            gc.collect()
        await asyncio.sleep(0)
    gc.collect()
    assert errors == []


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_rank_that_ends_between_two_questions_is_no_error(
    make: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection may be closed before the task that reads it has run: uvloop refuses to write then."""
    connect, writers = asyncio.open_connection, list[asyncio.StreamWriter]()

    async def open_connection(**given: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect(**given)
        writers.append(writer)
        return reader, writer

    async def ask_twice() -> None:
        here, there = socket.socketpair()
        channel = RankChannel(here)
        asking = asyncio.create_task(channel.ask("look", within=10.0))
        await asyncio.to_thread(there.recv, 1)
        writers[-1].transport.abort()  # as at a reset
        second = await channel.ask("look", within=10.0)
        assert (second, await asking) == (None, None)
        there.close()
        await channel.close()

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(ask_twice())
