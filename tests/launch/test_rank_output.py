"""Output of a rank's pipes is passed on, and the pipes are closed."""

from __future__ import annotations

import asyncio
import os

import pytest

from asyncpar.launch.rank_output import Relay


class Taken:
    def __init__(self, error: Exception | None = None) -> None:
        self.chunks: list[bytes] = []
        self._error = error

    async def take(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        if self._error is not None:
            raise self._error


async def is_closed(descriptor: int) -> bool:
    await asyncio.sleep(0)  # a transport closes its pipe in the next round of the loop
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


async def test_all_that_comes_is_taken_then_the_end_once_and_the_pipe_is_closed() -> None:
    read_end, write_end = os.pipe()
    taken = Taken()
    os.write(write_end, b"hello")
    os.close(write_end)
    await Relay(read_end, taken.take).run()
    assert taken.chunks == [b"hello", b""]
    assert await is_closed(read_end)


async def test_a_taker_that_fails_ends_it_and_the_pipe_is_closed() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"hello")
    with pytest.raises(RuntimeError, match="no room"):
        await Relay(read_end, Taken(RuntimeError("no room")).take).run()
    assert await is_closed(read_end)
    os.close(write_end)


async def test_a_pipe_that_stays_open_ends_when_it_is_closed_here() -> None:
    read_end, write_end = os.pipe()
    taken = Taken()
    relay = Relay(read_end, taken.take)
    running = asyncio.ensure_future(relay.run())
    while not relay.is_starved:  # noqa: ASYNC110  # no event tells of it
        await asyncio.sleep(0)
    relay.close()
    await running
    assert taken.chunks == [b""]
    assert await is_closed(read_end)
    os.close(write_end)


async def test_one_that_is_closed_before_it_runs_reads_nothing() -> None:
    read_end, write_end = os.pipe()
    taken = Taken()
    relay = Relay(read_end, taken.take)
    relay.close()
    relay.close()
    assert await is_closed(read_end)
    await relay.run()
    assert taken.chunks == []
    os.close(write_end)
