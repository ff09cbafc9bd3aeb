"""``PeerCancelled`` says why: type and text of what ended the operation on the other rank, on every path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled
from asyncpar.net.arena.driver import Driver
from asyncpar.testing import local_world
from asyncpar.testing.blocking_world import blocking_world

Call = Callable[[Communicator], Coroutine[Any, Any, Any]]

CALLS: dict[str, Call] = {
    "small": lambda c: c.all_reduce(np.ones(3)),
    "large": lambda c: c.all_reduce(np.ones(1_000_000)),
    "keyed": lambda c: c.all_gather(np.ones(3), key="k"),
    "object": lambda c: c.all_gather_object("x"),
}


SHORTLY = 0.02
"""Seconds until a call ends that would never be through: one of its ranks waits for that end."""


async def _by_hand(call: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(SHORTLY)
    task.cancel()
    await task


async def _with_a_message(call: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(SHORTLY)
    task.cancel("loss is nan")
    await task


async def _before_it_begins(call: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(call)
    task.cancel("too late")
    await task


async def _timeout(call: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.timeout(SHORTLY):
        await call


async def _timeout_around_a_gather(call: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.timeout(SHORTLY):
        await asyncio.gather(call, asyncio.sleep(5))


async def _wait_for(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.wait_for(call, SHORTLY)


async def _sibling(call: Coroutine[Any, Any, Any]) -> None:
    async def fail() -> None:
        await asyncio.sleep(SHORTLY)
        raise ArithmeticError("loss is nan")

    async with asyncio.TaskGroup() as group:
        group.create_task(call)
        group.create_task(fail())


async def _closed(call: Coroutine[Any, Any, Any]) -> None:
    call.close()


ENDS: dict[str, tuple[Callable[[Coroutine[Any, Any, Any]], Awaitable[None]], str]] = {
    "cancel": (_by_hand, "rank 1 cancelled it: CancelledError$"),
    "cancel with a message": (_with_a_message, "rank 1 cancelled it: CancelledError: loss is nan$"),
    "cancel before it begins": (_before_it_begins, "rank 1 cancelled it: CancelledError: too late, before it began$"),
    "timeout": (_timeout, "rank 1 cancelled it: TimeoutError: its deadline has passed$"),
    "timeout around a gather": (_timeout_around_a_gather, "rank 1 cancelled it: TimeoutError: its deadline has passed"),
    "wait_for": (_wait_for, "rank 1 cancelled it: TimeoutError: its deadline has passed$"),
    "sibling": (_sibling, "another task of its group has failed: ArithmeticError: loss is nan$"),
    "closed": (_closed, "rank 1 failed in it: it was called there, but never awaited$"),
}


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("name", CALLS)
async def test_the_other_rank_gets_the_reason(name: str, transport: str) -> None:
    async def main(communicator: Communicator) -> None:
        for end, text in ENDS.values():
            if communicator.rank == 2:
                await released.acquire()
            call = CALLS[name](communicator)
            if communicator.rank == 1:
                await asyncio.gather(end(call), return_exceptions=True)
            else:
                with pytest.raises(PeerCancelled, match=text) as caught:
                    await call
                assert caught.value.cause
                if communicator.rank == 0:
                    released.release()
        await communicator.barrier()

    released = asyncio.Semaphore(0)
    async with local_world(3, transport=transport) as nodes, asyncio.timeout(30):
        await asyncio.gather(*(main(node.world) for node in nodes))


@pytest.mark.parametrize("name", CALLS)
async def test_a_deadline_that_passes_in_the_turn_of_the_loop_is_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call lets the loop run before it begins, if that had no turn for a while."""

    async def main(communicator: Communicator) -> None:
        call = CALLS[name](communicator)
        if communicator.rank == 1:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await call
        else:
            with pytest.raises(PeerCancelled, match=r"rank 1 cancelled it: TimeoutError: its deadline has passed$"):
                await call

    async with local_world(2, transport="shm") as nodes, asyncio.timeout(30):
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        monkeypatch.setattr(Driver, "is_turn_due", lambda _driver, _now: True)
        await asyncio.gather(*(main(node.world) for node in nodes))


async def test_the_sender_of_a_large_message_gets_the_reason() -> None:
    async with local_world(2) as nodes, asyncio.timeout(30):
        zero, one = (node.world for node in nodes)
        sending = asyncio.ensure_future(zero.send(np.ones(1_000_000), 1))
        with pytest.raises(ValueError, match="receives"):
            await one.recv(0, out=np.ones(3))
        with pytest.raises(ValueError, match="rank 0 sends float64"):
            await sending
        receiving = asyncio.ensure_future(one.recv(0))
        await asyncio.sleep(0.01)
        sending = asyncio.ensure_future(zero.send(np.ones(20_000_000), 1))
        await asyncio.sleep(0)
        sending.cancel("no more data")
        with pytest.raises(PeerCancelled, match="rank 0 cancelled it: CancelledError: no more data"):
            await receiving


def test_a_timeout_of_a_blocking_call_is_reported() -> None:
    text = r"rank 1 cancelled it: TimeoutError: its timeout of 0\.05 s has passed"
    with blocking_world(3) as nodes:
        other = nodes[0].world.start.barrier()
        with pytest.raises(TimeoutError):
            nodes[1].world.barrier(timeout=0.05)
        with pytest.raises(PeerCancelled, match=text):
            other.wait(20)
