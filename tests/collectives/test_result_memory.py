"""Large results are received into memory that earlier results have left, and never into memory that is still held."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.array_pool import LEAST_BYTES
from asyncpar.net.transport.recycling import MemoryPool
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.products import in_turn

PATIENCE = 60.0
COUNT = 2 * LEAST_BYTES

Operation = Callable[[Communicator, Any], Awaitable[Any]]


async def send_and_receive(comm: Communicator, x: Any) -> Any:
    _, received = await asyncio.gather(comm.send(x, 1 - comm.rank), comm.recv(1 - comm.rank))
    return received


async def gather(comm: Communicator, x: Any) -> Any:
    results = [await comm.gather(x, root=root) for root in range(comm.size)]
    return results[comm.rank]


async def reduce(comm: Communicator, x: Any) -> Any:
    results = [await comm.reduce(x, op="max", root=root) for root in range(comm.size)]
    return results[comm.rank]


OPERATIONS: dict[str, Operation] = {
    "recv": send_and_receive,
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather_v": lambda comm, x: comm.all_gather_v(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x.reshape(2, -1)),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, op="max"),
    "gather": gather,
    "reduce": reduce,
}


def address(array: Any) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


async def on_all(nodes: Sequence[Node], operation: Operation, value: int) -> list[Any]:
    """Return the results of all ranks, of an array full of ``value``."""
    x = np.full(COUNT, value, np.uint8)
    return await asyncio.gather(*(operation(node.world, x) for node in nodes))


async def settle() -> None:
    """Let tasks that have ended go: they hold their results."""
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_large_result_takes_the_memory_that_an_earlier_one_has_left(name: str, transport: str) -> None:
    operation = OPERATIONS[name]
    async with local_world(2, transport=transport) as nodes, asyncio.timeout(PATIENCE):
        results = await on_all(nodes, operation, 1)
        places = [address(result) for result in results]
        del results
        await settle()
        idle = [node.links.memory.idle_bytes for node in nodes]
        assert min(idle) >= COUNT // 2
        results = await on_all(nodes, operation, 2)
        assert [address(result) for result in results] == places
        assert all((result == 2).all() for result in results)


@pytest.mark.parametrize(
    ("name", "hold"),
    in_turn(OPERATIONS, [lambda array: array[3:], memoryview, lambda array: array.view(np.int8)[::2]]),
)
async def test_a_result_that_is_held_stays_as_it_is(name: str, hold: Callable[[Any], Any]) -> None:
    operation = OPERATIONS[name]
    async with local_world(2) as nodes, asyncio.timeout(PATIENCE):
        held = [hold(result) for result in await on_all(nodes, operation, 1)]
        for value in (2, 3, 4):
            await settle()
            held += [hold(result) for result in await on_all(nodes, operation, value)]
        for value, pair in enumerate(zip(held[::2], held[1::2], strict=True), start=1):
            assert all((np.asarray(one) == value).all() for one in pair)


async def test_a_result_outlives_its_world() -> None:
    async with local_world(2) as nodes, asyncio.timeout(PATIENCE):
        results = await on_all(nodes, OPERATIONS["all_gather"], 7)
    assert all((result == 7).all() for result in results)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.bool_, np.float16, ml_dtypes.bfloat16])
async def test_memory_serves_arrays_of_any_dtype(dtype: Any) -> None:
    pool = MemoryPool()
    array = pool.empty((2, COUNT), np.dtype(dtype))
    place = address(array)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((2, COUNT), np.dtype(dtype), True)
    array[...] = 1
    del array
    assert address(pool.empty((COUNT, 2), np.dtype(dtype))) == place
    pool.close()


async def test_other_threads_get_memory_of_their_own() -> None:
    pool = MemoryPool()
    place = address(pool.empty((COUNT,), np.dtype(np.uint8)))
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(pool.empty((COUNT,), np.dtype(np.uint8))))
    thread.start()
    thread.join()
    assert pool.idle_bytes >= COUNT
    assert address(made[0]) != place
    pool.close()
