"""Buffers in the heap: found by their pointer, freed with their last view."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from asyncpar.errors import ArenaFull, UsageError
from asyncpar.net.arena.buffers import Buffers
from asyncpar.net.arena.segment import Segment

HEAP = 64 * mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(control_bytes=mmap.PAGESIZE, heap_bytes=HEAP, nonce=bytes(32))
    yield made
    made.close()


@pytest.fixture
def buffers(segment: Segment) -> Iterator[Buffers]:
    made = Buffers(segment)
    yield made
    made.close()


def used(segment: Segment) -> int:
    """Bytes of memory that the heap takes."""
    return os.fstat(segment._descriptor).st_blocks * 512 - segment.control_bytes  # noqa: SLF001  # pages that the system has given to a segment are found by its descriptor alone


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, bool, np.complex64, ml_dtypes.bfloat16, "float16"])
def test_a_buffer_is_an_ordinary_array(buffers: Buffers, dtype: str) -> None:
    array = buffers.empty((3, 5), dtype)
    array[:] = 1
    assert (array.shape, array.dtype) == ((3, 5), np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0
    assert np.array_equal(array, np.ones((3, 5), dtype))


def test_a_buffer_lies_where_it_is_located(buffers: Buffers, segment: Segment) -> None:
    buffers.empty(1, np.int8)
    array = buffers.empty(100, np.int32)
    array[:] = range(100)
    offset = buffers.locate(array)
    assert offset is not None
    assert offset % 64 == 0
    assert np.array_equal(segment.heap_array(offset, 100, np.int32), array)


def test_contiguous_views_are_located_too(buffers: Buffers) -> None:
    array = buffers.empty((4, 8), np.float32)
    offset = buffers.locate(array)
    assert offset is not None
    assert buffers.locate(array[2:]) == offset + 2 * 8 * 4
    assert buffers.locate(array.reshape(-1).view(np.int16)[3:]) == offset + 6
    assert buffers.locate(np.frombuffer(array.data.cast("B"), np.uint8)[5:]) == offset + 5


def test_what_is_elsewhere_scattered_or_empty_is_not_located(buffers: Buffers) -> None:
    assert buffers.locate(np.zeros(3)[1:]) is None
    array = buffers.empty((4, 8), np.float32)
    for other in (np.zeros(4), np.zeros((4, 8))[1:], array.T, array[:, ::2], array[1:1], array.copy()):
        assert buffers.locate(other) is None


def test_shapes_may_be_numbers_and_may_be_empty(buffers: Buffers, segment: Segment) -> None:
    assert buffers.empty(np.int64(7), np.int8).shape == (7,)
    assert buffers.empty((), np.int8).shape == ()
    assert buffers.empty((0, 3), np.int8).shape == (0, 3)


def test_memory_is_given_back_when_the_last_view_is_gone(buffers: Buffers, segment: Segment) -> None:
    array = buffers.empty((2, mmap.PAGESIZE), np.int8)
    view = array[1:].reshape(-1)[5:].data
    assert used(segment) == 2 * mmap.PAGESIZE
    del array
    gc.collect()
    assert used(segment) == 2 * mmap.PAGESIZE
    del view
    gc.collect()
    assert used(segment) == 0


def test_a_freed_range_is_used_again(buffers: Buffers) -> None:
    for _ in range(10):
        whole = buffers.empty(HEAP, np.int8)
        assert buffers.locate(whole) == 0
        del whole


def test_a_buffer_may_die_on_another_thread(buffers: Buffers, segment: Segment) -> None:
    arrays = [buffers.empty(mmap.PAGESIZE, np.int8) for _ in range(8)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert used(segment) == 0
    assert buffers.empty(HEAP, np.int8).size == HEAP


def test_a_buffer_that_dies_in_a_forked_child_stays_alive_here(
    buffers: Buffers, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = buffers.empty(4, np.int8)
    peer = segment.heap_array(0, 4, np.int8)
    array[:] = 9
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del array
    gc.collect()
    assert peer.tolist() == [9] * 4


def test_a_full_heap_says_how_much_there_is(buffers: Buffers) -> None:
    keep = buffers.empty(HEAP - 3 * mmap.PAGESIZE, np.int8)
    with pytest.raises(ArenaFull, match=f"a buffer of {HEAP} bytes is needed, the largest free range of the heap has "):
        buffers.empty(HEAP, np.int8)
    assert buffers.empty(3 * mmap.PAGESIZE, np.int8).size + keep.size == HEAP


def test_a_host_without_memory_says_so_and_the_range_stays_free(segment: Segment) -> None:
    room = [0]
    buffers = Buffers(segment, room=lambda: room[0])
    with pytest.raises(ArenaFull, match=r"1 MiB of shared memory needed, 0 MiB available"):
        buffers.empty(HEAP, np.int8)
    room[0] = HEAP
    assert buffers.empty(HEAP, np.int8).size == HEAP


def test_free_memory_is_not_looked_up_for_each_buffer(segment: Segment) -> None:
    looked: list[int] = []

    def look() -> int:
        looked.append(1)
        return HEAP

    buffers = Buffers(segment, room=look)
    keep = [buffers.empty(1, np.int8) for _ in range(HEAP // mmap.PAGESIZE // 8)]
    assert len(looked) == 1
    keep += [buffers.empty(1, np.int8) for _ in range(3)]
    assert len(looked) == 2


@pytest.mark.parametrize("dtype", [object, np.dtype([("name", object)])])
def test_objects_are_refused(buffers: Buffers, dtype: np.dtype[np.object_]) -> None:
    with pytest.raises(UsageError, match=r"^dtype: expected plain numbers"):
        buffers.empty(3, dtype)


def test_negative_extents_are_refused(buffers: Buffers) -> None:
    with pytest.raises(UsageError, match=r"^shape: expected extents of 0 or more, got \(3, -1\)"):
        buffers.empty((3, -1), np.int8)


def test_buffers_outlive_the_end(segment: Segment) -> None:
    buffers = Buffers(segment)
    array = buffers.empty(5, np.int8)
    buffers.close()
    segment.close()
    array[:] = 4
    assert array.sum() == 20
    assert buffers.locate(array) is None
    with pytest.raises(UsageError, match="arena: it is closed"):
        buffers.empty(5, np.int8)
