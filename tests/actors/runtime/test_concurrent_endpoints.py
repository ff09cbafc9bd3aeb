"""Concurrent endpoints."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.errors import ActorDown, RemoteError, UsageError
from tests.actors.runtime.test_mailbox import settle


class Mixed(Actor):
    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate
        self.running = 0
        self.most = 0
        self.order: list[int] = []
        self.barrier = threading.Barrier(2)

    @endpoint
    async def train(self) -> str:
        await self.gate.wait()
        return "trained"

    @endpoint(concurrency=3)
    async def read(self, item: int) -> int:
        self.order.append(item)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        return self.most

    @endpoint(concurrency=2)
    def block(self) -> int:
        return self.barrier.wait(timeout=20)  # passes only if two calls run at once

    @endpoint(concurrency=2)
    async def peek(self) -> int:
        return self.running


async def spawn(ranks: Any, gate: asyncio.Event) -> Any:
    await ranks.systems[1].spawn(Mixed, gate, name="m")
    return ranks.systems[0].ref("m", rank=1)


@pytest.mark.promise("concurrency")
async def test_at_most_so_many_calls_run_at_once_in_the_order_of_arrival(open_ranks: Any) -> None:
    gate = asyncio.Event()
    async with open_ranks(2) as ranks:
        ref = await spawn(ranks, gate)
        asks = [asyncio.create_task(ref.read(item)) for item in range(7)]
        await settle()
        assert await ref.peek() == 3
        gate.set()
        assert await asyncio.gather(*asks) == [3] * 7


async def test_concurrent_endpoints_run_beside_a_sequential_one(open_ranks: Any) -> None:
    gate = asyncio.Event()
    async with open_ranks(2) as ranks:
        ref = await spawn(ranks, gate)
        training = asyncio.create_task(ref.train())
        await settle()
        assert await ref.peek() == 0
        assert not training.done()
        gate.set()
        assert await training == "trained"


@pytest.mark.promise("threads")
async def test_plain_endpoints_run_in_as_many_threads(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ref = await spawn(ranks, asyncio.Event())
        assert sorted(await asyncio.gather(ref.block(), ref.block())) == [0, 1]


async def test_a_cancelled_ask_frees_its_place(open_ranks: Any) -> None:
    gate = asyncio.Event()
    async with open_ranks(2) as ranks:
        ref = await spawn(ranks, gate)
        asks = [asyncio.create_task(ref.read(item)) for item in range(4)]
        await settle()
        asks[1].cancel()
        await settle()
        assert await ref.peek() == 3, "the fourth took its place"
        asks[0].cancel()
        await settle()
        assert await ref.peek() == 2
        gate.set()
        await asyncio.wait(asks)
        assert [ask.cancelled() for ask in asks] == [True, True, False, False]


async def test_stop_waits_for_concurrent_calls_and_kill_does_not(open_ranks: Any) -> None:
    gate = asyncio.Event()
    async with open_ranks(2) as ranks:
        ref = await spawn(ranks, gate)
        asks = [asyncio.create_task(ref.read(item)) for item in range(5)]
        await settle()
        stopping = asyncio.create_task(ranks.systems[0].stop(ref))
        await settle()
        assert not stopping.done()
        gate.set()
        await stopping
        assert await asyncio.gather(*asks) == [3] * 5

        gate.clear()
        ref = await spawn(ranks, gate)
        asks = [asyncio.create_task(ref.read(item)) for item in range(5)]
        await settle()
        await ranks.systems[0].kill(ref)
        for ask in asks:
            with pytest.raises(ActorDown, match="the actor was killed"):
                await ask


class Selfish(Actor):
    """Waits for the end of the actor that it is given."""

    def __init__(self, system: Any) -> None:
        self.system = system

    @endpoint(concurrency=2)
    async def end(self, name: str) -> None:
        await self.system.stop(self.system.ref(name))

    @endpoint
    async def bear(self, name: str) -> None:
        await self.spawn(Selfish, self.system, name=name)


@pytest.mark.parametrize("name", ["owner", "child"])
async def test_waiting_for_ones_own_end_or_that_of_ones_owner_is_refused(open_ranks: Any, name: str) -> None:
    async with open_ranks(1) as ranks:
        owner = await ranks.systems[0].spawn(Selfish, ranks.systems[0], name="owner")
        await owner.bear("child")
        with pytest.raises(RemoteError, match="cannot wait for its own end, nor a child for its owner's"):
            await ranks.systems[0].ref(name).end("owner")
        await owner.end("child")


async def test_a_told_concurrent_call_that_raises_is_a_failure(
    open_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Fragile(Mixed):
        @endpoint(concurrency=2)
        async def fall(self) -> None:
            raise RuntimeError("down")

    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Fragile, asyncio.Event(), name="m")
        ref = ranks.systems[0].ref("m", rank=1)
        training = asyncio.create_task(ref.train())
        await settle()
        ref.fall.tell()
        with pytest.raises(ActorDown, match="the actor failed: RuntimeError: down"):
            await training
    assert [record.getMessage() for record in caplog.records] == ["rank 1: actor 'm' failed"]


@pytest.mark.parametrize("count", [0, -1])
def test_concurrency_is_at_least_one(count: int) -> None:
    with pytest.raises(UsageError, match="concurrency: expected at least 1"):
        endpoint(concurrency=count)
