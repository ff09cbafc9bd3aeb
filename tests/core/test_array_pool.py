"""Memory of large arrays: used again once nothing refers to it, and never before."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.array_pool import LEAST_BYTES, ArrayPool
from asyncpar.core.heap import give_back_free_memory

COUNT = LEAST_BYTES // 4
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda array: array,
    "a view": lambda array: array[1:3],
    "a view of a view": lambda array: array.reshape(2, -1)[1][::2].T,
    "a view of another dtype": lambda array: array.view(np.uint8)[8:],
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda array: memoryview(array).cast("B")[16:32],
    "an iterator": lambda array: iter(array[:2]),
    "what was made of its buffer": lambda array: np.frombuffer(memoryview(array), np.uint8),
    "an attribute": lambda array: array.flat,
}


def address(array: Any) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def test_memory_that_nobody_holds_is_lent_again() -> None:
    pool = ArrayPool(lambda: 10 * LEAST_BYTES)
    array = pool.empty((4, COUNT // 4), np.float32)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array.fill(3.0)
    place = address(array)
    assert pool.idle_bytes == 0
    del array
    assert pool.idle_bytes == LEAST_BYTES
    again = pool.zeros((COUNT // 2,), np.float64)
    assert address(again) == place
    assert not again.any()
    assert pool.blocks_made == 1


def test_a_pool_without_a_limit_of_its_own_holds_as_much_as_was_lent_at_once() -> None:
    pool = ArrayPool(None)
    held = [pool.empty((count * COUNT,), np.float32) for count in (1, 2, 3)]
    held.clear()
    assert pool.idle_bytes == pool.most_lent_bytes == 6 * LEAST_BYTES
    large = pool.empty((5 * COUNT,), np.float32)
    assert pool.idle_bytes + pool.lent_bytes <= pool.most_lent_bytes == 6 * LEAST_BYTES
    del large
    assert pool.idle_bytes == 6 * LEAST_BYTES  # with the block of one, which waited least
    pool.empty((5 * COUNT,), np.float32)
    assert pool.blocks_made == 4


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_not_lent_again_while_anything_on_it_lives(holder: str) -> None:
    pool = ArrayPool(lambda: 10 * LEAST_BYTES)
    array = pool.zeros((COUNT,), np.float32)
    place = address(array)
    held = HOLDERS[holder](array)
    del array
    gc.collect(0)  # of what a holder has left in a circle
    others = [pool.empty((COUNT,), np.float32) for _ in range(3)]
    assert place not in map(address, others)
    assert pool.idle_bytes == 0
    del held
    gc.collect(0)
    assert pool.idle_bytes == LEAST_BYTES


def test_memory_of_another_size_is_left_alone_and_what_is_small_does_not_stay() -> None:
    pool = ArrayPool(lambda: 10 * LEAST_BYTES)
    array, small = pool.empty((COUNT,), np.float32), pool.zeros((COUNT - 1,), np.float32)
    del array, small
    assert pool.idle_bytes == LEAST_BYTES
    other = pool.empty((COUNT + 1,), np.float32)
    assert (pool.idle_bytes, pool.blocks_made, len(other)) == (LEAST_BYTES, 2, COUNT + 1)


def test_what_waits_keeps_within_the_limit_and_the_oldest_goes_first() -> None:
    most = 2 * LEAST_BYTES
    pool = ArrayPool(lambda: most)
    held = [pool.empty((COUNT,), np.float32) for _ in range(4)]
    places = [address(array) for array in held]
    while held:
        held.pop(0)
    pool.trim()
    assert pool.idle_bytes == most
    assert [address(pool.empty((COUNT,), np.float32)) for _ in range(2)] == [places[3], places[3]]
    most = 0
    assert pool.idle_bytes == 0


def test_memory_may_be_dropped_by_another_thread() -> None:
    pool = ArrayPool(lambda: 10 * LEAST_BYTES)
    held = [pool.empty((COUNT,), np.float32)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.idle_bytes == LEAST_BYTES


def test_threads_are_never_lent_the_same_memory() -> None:
    pool = ArrayPool(lambda: 100 * LEAST_BYTES)
    wrong = []

    def write(mark: int) -> None:
        for _ in range(50):
            array = pool.empty((COUNT,), np.float32)
            array.fill(mark)
            if (array[:: COUNT // 7] != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=write, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.blocks_made <= 2 * len(threads), "a thread takes the next array before it lets go of the last"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_keeps_nothing(copied: Callable[[ArrayPool], ArrayPool]) -> None:
    pool = ArrayPool(lambda: 10 * LEAST_BYTES)
    held = pool.empty((COUNT,), np.float32)
    other = copied(pool)
    array = other.zeros((COUNT,), np.float32)
    del array, held
    assert (other.idle_bytes, pool.idle_bytes) == (0, LEAST_BYTES)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, to see what the system has")
def test_mapped_memory_is_the_systems_again_when_it_is_dropped() -> None:
    """Between blocks that are in use, where the allocator of the C library keeps what is freed."""
    pool = ArrayPool(lambda: 1 << 40, is_mapped=True)
    nbytes = 4 << 20
    lent = [pool.zeros((nbytes,), np.uint8) for _ in range(16)]
    before = resident_bytes()
    del lent[::2]
    assert resident_bytes() > before - nbytes
    pool.trim(2 * nbytes)
    assert pool.idle_bytes == 2 * nbytes
    assert resident_bytes() < before - 5 * nbytes
    assert all(not array.any() for array in lent)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs huge pages, and /proc")
@pytest.mark.parametrize("nbytes", [4 << 20, (4 << 20) + 1, 12_500_000, (64 << 20) - 4, 9_999_999])
def test_large_blocks_begin_with_a_huge_page_and_take_little_more_than_asked_for(nbytes: int) -> None:
    """A fault for each page of two megabytes; a block that begins anywhere has hundreds of small ones at both ends."""
    pool = ArrayPool(is_mapped=True)
    before = resident_bytes()
    lent = [pool.empty((nbytes,), np.uint8) for _ in range(4)]
    for array in lent:
        array.fill(3)
        assert address(array) % (2 << 20) == 0
    assert resident_bytes() - before < 4 * nbytes * (1 + 1 / 32) + (2 << 20)
    assert all((array == 3).all() for array in lent)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the allocator of glibc")
def test_the_heap_gives_back_holes() -> None:
    held = [np.full(1 << 16, 1, np.uint8) for _ in range(1024)]  # too small to be mapped one by one
    del held[::2]
    before = resident_bytes()
    give_back_free_memory()
    assert resident_bytes() < before - (16 << 20)
    assert all(array.all() for array in held)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
