"""Large values are copied beside the loop, and arrive as they were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.net.wire import payload
from asyncpar.net.wire.array import AnyArray, write_array

COUNT = 1 << 17
"""Elements of 8 bytes: a value that is large here."""


class Store(ap.Actor):
    def __init__(self) -> None:
        self.array = np.zeros(COUNT)

    @ap.endpoint
    async def get(self) -> Any:
        return self.array

    @ap.endpoint
    def get_in_thread(self) -> Any:
        return {"array": self.array}

    @ap.endpoint
    async def add(self) -> None:
        self.array += 1

    @ap.endpoint
    async def items(self) -> AsyncIterator[Any]:
        for _ in range(3):
            yield self.array
            self.array += 1


Use = Callable[[ap.Node, Any], Coroutine[Any, Any, Any]]


async def _read_all(store: Any) -> list[Any]:
    return [item async for item in store.items.stream()]


def _large() -> AnyArray:
    return np.ones(COUNT)


USES: dict[str, Use] = {
    "result": lambda _, store: store.get(),
    "result of a thread": lambda _, store: store.get_in_thread(),
    "stream": lambda _, store: _read_all(store),
    "broadcast_object": lambda node, _: node.world.broadcast_object(_large() if node.rank == 0 else None),
    "all_gather_object": lambda node, _: node.world.all_gather_object([_large()]),
    "gather_object": lambda node, _: node.world.gather_object([_large()]),
    "scatter_object": lambda node, _: node.world.scatter_object([_large()] * 2 if node.rank == 0 else None),
    "send_object": lambda node, _: node.world.send_object(_large(), 1) if node.rank == 0 else node.world.recv_object(0),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads in which arrays were copied into payloads."""
    seen: list[int] = []

    def write(array: AnyArray, memory: memoryview, offset: int) -> None:
        seen.append(threading.get_ident())
        write_array(array, memory, offset)

    for module in (
        "actors.runtime.callee",
        "actors.runtime.stream_ends",
        "collectives.objects",
        "collectives.mailbox",
    ):
        monkeypatch.setattr(f"asyncpar.{module}.INLINE_COPY_BYTES", 1 << 19)
    monkeypatch.setattr(payload, "write_array", write)
    return seen


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_large_value_is_never_copied_on_the_loop(use: Use, threads: list[int]) -> None:
    async with ap.testing.local_world(2) as (here, there):
        await there.spawn(Store, name="store")
        await asyncio.gather(*(use(node, node.ref("store", rank=1)) for node in (here, there)))
    assert threads
    assert threading.get_ident() not in threads


async def test_a_large_result_is_what_it_was_when_the_endpoint_returned(threads: list[int]) -> None:
    async with ap.testing.local_world(2) as (here, there):
        await there.spawn(Store, name="store")
        store = here.ref("store", rank=1)
        calls = [call() for _ in range(4) for call in (store.get, store.add)]
        results = [result for result in await asyncio.gather(*calls) if result is not None]
        assert [set(result) for result in results] == [{0.0}, {1.0}, {2.0}, {3.0}]
        assert [set(item) for item in await _read_all(store)] == [{4.0}, {5.0}, {6.0}]
    assert threads


async def test_a_caller_that_goes_while_its_result_is_copied_disturbs_nobody(threads: list[int]) -> None:
    async with ap.testing.local_world(2) as (here, there):
        await there.spawn(Store, name="store")
        store = here.ref("store", rank=1)
        call = asyncio.ensure_future(store.get())
        while not threads:  # noqa: ASYNC110  # there is no event: the copying is what is looked at
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert (await store.get()).shape == (COUNT,)
