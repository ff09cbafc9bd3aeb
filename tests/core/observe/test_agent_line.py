"""Losses that the agent reports, for one world after the other in the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from asyncpar.core.observe.agent_line import AgentLine, Loss, encode_loss
from asyncpar.core.observe.reporting import Reporter
from asyncpar.errors import PeerLost


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


async def test_a_loss_of_another_generation_is_dropped_and_counted(pipe: tuple[int, int]) -> None:
    received: list[tuple[int, str]] = []
    with closing(AgentLine(Reporter.from_environment({}), pipe[0], generation=3)) as line:
        line.open()
        line.deliver(lambda rank, how: received.append((rank, how)))
        for generation in (2, 3, 4):
            os.write(pipe[1], encode_loss(Loss(generation, "host", "ended"), generation=generation))
        await asyncio.sleep(0.05)
        assert received == [(3, "ended")]
        assert line.stale == 2


async def test_what_an_older_world_left_in_the_pipe_does_not_end_a_newer_one(pipe: tuple[int, int]) -> None:
    """The agent reported the loss that ended the first world when nobody read any more."""
    os.write(pipe[1], encode_loss(Loss(1, "host", "was killed by SIGKILL"), generation=0))
    with closing(AgentLine(Reporter.from_environment({}), pipe[0], generation=1)) as line:
        line.open()
        assert await line.unless_lost(asyncio.sleep(0.05, "joined"), "join") == "joined"


async def test_a_cancellation_that_a_loss_explains_ends_with_the_loss(pipe: tuple[int, int]) -> None:
    """The process was busy: the loss is in the pipe, and the loop has not looked."""
    with closing(AgentLine(Reporter.from_environment({}), pipe[0], generation=0)) as line:
        line.open()
        waiting = asyncio.ensure_future(line.unless_lost(asyncio.sleep(3600), "join"))
        await asyncio.sleep(0)
        os.write(pipe[1], encode_loss(Loss(1, "host", "was killed by SIGKILL"), generation=0))
        waiting.cancel()
        with pytest.raises(PeerLost, match="join: rank 1 on host is lost: was killed by SIGKILL"):
            await waiting


async def test_a_cancellation_while_the_work_ends_does_not_replace_the_loss(pipe: tuple[int, int]) -> None:
    is_ending, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            is_ending.set()
            await may_end.wait()

    with closing(AgentLine(Reporter.from_environment({}), pipe[0], generation=0)) as line:
        line.open()
        waiting = asyncio.ensure_future(line.unless_lost(work(), "join"))
        await asyncio.sleep(0)
        os.write(pipe[1], encode_loss(Loss(1, "host", "ended"), generation=0))
        await is_ending.wait()
        waiting.cancel()
        with pytest.raises(PeerLost, match="rank 1 on host is lost: ended"):
            await waiting


async def test_a_cancellation_without_a_loss_is_one(pipe: tuple[int, int]) -> None:
    with closing(AgentLine(Reporter.from_environment({}), pipe[0], generation=0)) as line:
        line.open()
        waiting = asyncio.ensure_future(line.unless_lost(asyncio.sleep(3600), "join"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
