"""The pool of memory for large messages: what is free is used again, what is held is not, what is old goes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from asyncpar.core.array_pool import LEAST_BYTES
from asyncpar.net.transport.recycling import KEEP_SECONDS, MOST_BLOCKS, MOST_BYTES, MemoryPool
from asyncpar.net.wire.payload import ALIGNMENT
from asyncpar.testing.loop import VirtualTimeLoop

SIZE = LEAST_BYTES + 12_345


def address(memory: memoryview) -> int:
    place: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return place


async def test_memory_that_nobody_holds_is_lent_again() -> None:
    pool = MemoryPool()
    memory = pool.allocate(SIZE)
    assert (len(memory), memory.format, memory.readonly) == (SIZE, "B", False)
    place = address(memory)
    assert place % ALIGNMENT == 0
    assert pool.idle_bytes == 0
    del memory
    assert pool.idle_bytes >= SIZE
    assert address(pool.allocate(SIZE - 1)) == place
    pool.close()


async def test_memory_is_not_lent_again_while_any_array_on_it_lives() -> None:
    pool = MemoryPool()
    memory = pool.allocate(SIZE)
    part = np.ndarray((10,), np.uint8, buffer=memory, offset=100)[2:5]
    del memory
    assert pool.idle_bytes == 0
    other = pool.allocate(SIZE)
    part[:] = 7
    other[:] = bytes(SIZE)
    assert part.tolist() == [7, 7, 7]
    del part
    assert pool.idle_bytes >= SIZE
    pool.close()


@pytest.mark.parametrize("length", [0, 1, LEAST_BYTES - 1, MOST_BYTES + 1])
async def test_what_is_small_or_huge_does_not_stay(length: int) -> None:
    pool = MemoryPool()
    assert len(pool.allocate(length)) == length
    assert pool.idle_bytes == 0


async def test_few_blocks_wait_and_those_of_another_size_are_left_alone() -> None:
    pool = MemoryPool()
    held = [pool.allocate(SIZE) for _ in range(MOST_BLOCKS + 3)]
    held.clear()
    assert pool.idle_bytes < (MOST_BLOCKS + 1) * 2 * SIZE
    idle = pool.idle_bytes
    other = pool.allocate(8 * SIZE)
    assert pool.idle_bytes == idle
    del other
    pool.close()
    assert pool.idle_bytes == 0


def test_what_is_not_used_again_for_a_while_goes_back_to_the_system() -> None:
    async def scenario() -> None:
        pool = MemoryPool()
        held = pool.allocate(SIZE)
        await asyncio.sleep(10 * KEEP_SECONDS)
        del held
        assert pool.idle_bytes > 0
        await asyncio.sleep(2 * KEEP_SECONDS)
        assert pool.idle_bytes == 0
        assert pool._timer is None  # noqa: SLF001  # a timer that goes on for nothing shows nowhere else

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())


async def test_memory_may_be_dropped_by_another_thread_and_after_the_end() -> None:
    pool = MemoryPool()
    held = [pool.allocate(SIZE)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.idle_bytes >= SIZE
    late = pool.allocate(SIZE)
    pool.close()
    del late
    assert pool.idle_bytes == 0
    pool.close()
