"""Large values are copied beside the loop, and arrive as they were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import asyncpar as ap
from asyncpar.actors.runtime import callee
from asyncpar.net.wire import payload
from asyncpar.net.wire.array import AnyArray, write_array

COUNT = 1 << 17
"""Elements of 8 bytes: a value that is large here."""


class Store(ap.Actor):
    def __init__(self) -> None:
        self.array = np.zeros(COUNT)
        self.order: list[str] = []

    @ap.endpoint
    async def get(self) -> Any:
        return self.array

    @ap.endpoint
    def get_in_thread(self) -> Any:
        return {"array": self.array}

    @ap.endpoint(concurrency=2)
    async def get_beside(self) -> Any:
        return self.array

    @ap.endpoint
    async def add(self) -> None:
        self.array += 1

    @ap.endpoint
    async def items(self) -> AsyncIterator[Any]:
        for _ in range(3):
            yield self.array
            self.array += 1

    @ap.endpoint
    async def put(self, array: npt.NDArray[np.float64]) -> int:
        self.order.append("put")
        return int(array.sum())

    @ap.endpoint
    async def note(self) -> None:
        self.order.append("note")

    @ap.endpoint
    async def seen(self) -> list[str]:
        return self.order

    @ap.endpoint
    async def put_all(self, array: npt.NDArray[np.float64], more: AsyncIterator[int]) -> int:
        return int(array.sum()) + len([item async for item in more])

    @ap.endpoint
    async def halves(self, array: npt.NDArray[np.float64]) -> AsyncIterator[int]:
        for half in np.split(array, 2):
            yield int(half.sum())


class Holder(ap.Actor):
    def __init__(self, array: npt.NDArray[np.float64]) -> None:
        self.total = int(array.sum())

    @ap.endpoint
    async def get(self) -> int:
        return self.total


Use = Callable[[ap.Node, Any], Coroutine[Any, Any, Any]]


async def _read_all(store: Any) -> list[Any]:
    return [item async for item in store.items.stream()]


def _large() -> AnyArray:
    return np.ones(COUNT)


async def _ask_with_argument(node: ap.Node, _: Any) -> None:
    assert await node.ref("store", rank=1).put(_large()) == COUNT


async def _ask_with_stream(node: ap.Node, _: Any) -> None:
    async def more() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    store = node.ref("store", rank=1, actor_class=Store)
    assert await store.put_all(_large(), more()) == COUNT + 3


async def _stream_with_argument(node: ap.Node, _: Any) -> None:
    store: Any = node.ref("store", rank=1)
    assert [item async for item in store.halves.stream(_large())] == [COUNT // 2] * 2


async def _spawn(node: ap.Node, _: Any) -> None:
    if node.rank == 0:
        holders: Any = await node.nodes.spawn(Holder, _large(), name="holders")
        assert list((await holders.get()).values()) == [COUNT] * 2


USES: dict[str, Use] = {
    "result": lambda _, store: store.get(),
    "argument": _ask_with_argument,
    "argument beside a stream": _ask_with_stream,
    "argument of a stream": _stream_with_argument,
    "argument of a constructor": _spawn,
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
        "actors.runtime.caller",
        "actors.runtime.stream_ends",
        "collectives.objects",
        "collectives.point_to_point",
    ):
        monkeypatch.setattr(f"asyncpar.{module}.INLINE_COPY_BYTES", 1 << 19)
    monkeypatch.setattr(payload, "write_array", write)
    return seen


@pytest.fixture
def gate(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No array is copied before this is set: a thread may be done before its caller has looked."""
    opened = threading.Event()

    def write(array: AnyArray, memory: memoryview, offset: int) -> None:
        assert opened.wait(30.0)
        threads.append(threading.get_ident())
        write_array(array, memory, offset)

    monkeypatch.setattr(payload, "write_array", write)
    yield opened
    opened.set()


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


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_messages_keep_their_order_behind_one_that_is_copied_in_a_thread(
    is_cancelled: bool, gate: threading.Event, threads: list[int]
) -> None:
    async with ap.testing.local_world(1) as (node,):
        store = await node.spawn(Store)
        put = asyncio.ensure_future(store.put(_large()))
        await asyncio.sleep(0)
        told = store.note.tell()
        if is_cancelled:
            put.cancel()
        gate.set()
        await asyncio.wait({put})
        await told
        assert await store.seen() == (["note"] if is_cancelled else ["put", "note"])
    assert threads


async def test_a_node_that_closes_while_an_argument_is_copied_ends_the_ask(gate: threading.Event) -> None:
    async with ap.testing.local_world(1) as (node,):
        store = await node.spawn(Store)
        put = asyncio.ensure_future(store.put(_large()))
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(ap.PeerError):
        await put


@pytest.mark.parametrize("endpoint", ["get", "get_in_thread", "get_beside"])
@pytest.mark.parametrize("is_large", [False, True])
async def test_a_result_for_which_memory_is_short_is_an_error_of_its_call_only(
    endpoint: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    async with ap.init() as node:
        store: Any = await node.spawn(Store)
        if is_large:
            monkeypatch.setattr(callee, "INLINE_COPY_BYTES", 1 << 10)
        with monkeypatch.context() as short:
            short.setattr(payload, "write_array", fail)
            with pytest.raises(ap.RemoteError, match=rf"the result of {endpoint}\(\): no room") as caught:
                await getattr(store, endpoint)()
        assert caught.value.type_name == "MemoryError"
        assert (await store.get()).shape == (COUNT,)
