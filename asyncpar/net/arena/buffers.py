"""Arrays in a rank's own heap: collectives on them need no copy into shared memory.

Theory of operation.  A buffer's memory belongs to its array: when the array and all views of it are gone, a finalizer
punches the pages out of the memory file, which frees them at once, for peers too, and records the range.  Finalizers
run wherever the last reference is dropped: in any thread, and even, by garbage collection, in the middle of an
allocation.  So they never touch the list of free ranges; they append to a queue (atomic), which the next allocation
empties.  A forked child has the same arrays and the same memory (it is shared, so that writes of either are visible to
both); the child's finalizers leave it alone.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from asyncpar.errors import ArenaFull, UsageError
from asyncpar.net.arena.heap import FreeRanges
from asyncpar.net.arena.limits import available_memory
from asyncpar.net.arena.segment import Segment

_MADV_REMOVE = 9
_HEADER = object.__basicsize__


class Buffers:
    """The buffers in this rank's ``segment``.  Use it on one thread; buffers may be freed on any."""

    def __init__(self, segment: Segment, *, room: Callable[[], int] = available_memory) -> None:
        self._segment: Segment | None = segment
        self._problem = ""
        self._room = room
        self._measured = self._taken = 0
        self._ranges = FreeRanges(capacity=segment.heap_bytes, granularity=mmap.PAGESIZE)
        self._returned: deque[int] = deque()
        self._start = self._size = 0
        self._read = _pointer_reader()

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> NDArray[Any]:
        """Return a new C-contiguous array, aligned to a page, whose content is undefined.

        Takes about half a millisecond per MiB, because the memory is allocated and mapped now.  Raises ``ArenaFull`` if
        there is none, ``UsageError`` for a dtype that holds objects.
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise UsageError(f"dtype: expected plain numbers, got {kind}")
        shape = (int(shape),) if isinstance(shape, SupportsIndex) else tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in shape):
            raise UsageError(f"shape: expected extents of 0 or more, got {shape}")
        size = math.prod(shape) * kind.itemsize
        if size == 0:
            return np.empty(shape, kind)
        return self._make(shape, kind, size)

    def locate(self, array: NDArray[Any]) -> int | None:
        """Return the heap offset of ``array`` if it is C-contiguous and lies in this heap; else None."""
        if array.base is None or not self._size:  # an array that owns its memory is elsewhere
            return None
        offset = self._read(id(array) + _HEADER).value - self._start
        if 0 <= offset < self._size and array.size and array.flags.c_contiguous:
            return offset
        return None

    def close(self, problem: str = "arena: it is closed") -> None:
        """Refuse further allocations, because of ``problem``.  Idempotent; arrays live on."""
        self._segment = None
        self._problem = problem
        self._start = self._size = 0

    def _make(self, shape: tuple[int, ...], kind: np.dtype[Any], size: int) -> NDArray[Any]:
        if self._segment is None:
            raise UsageError(self._problem)
        while self._returned:
            self._ranges.release(self._returned.popleft())
        heap = self._segment.heap()
        offset = self._ranges.allocate(size)
        if offset is None:
            raise ArenaFull(
                f"arena: a buffer of {size} bytes is needed, the largest free range of the heap has "
                f"{self._ranges.largest} of {self._segment.heap_bytes}"
            )
        whole = self._ranges.round_up(size)
        try:
            self._segment.take_heap_memory(offset, whole, room=lambda: self._room_for(whole))
        except ArenaFull:
            self._ranges.release(offset)
            raise
        self._taken += whole
        array = np.ndarray(shape, kind, buffer=heap, offset=offset)
        weakref.finalize(array, _give_back, heap, self._returned, offset, whole, os.getpid()).atexit = False
        if not self._size:
            self._start = array.__array_interface__["data"][0] - offset
            self._size = self._segment.heap_bytes
        return array

    def _room_for(self, size: int) -> int:
        """Return the available memory, measured again only if an eighth of it was taken or it seems too little."""
        if self._taken > self._measured // 8 or size > self._measured - self._taken:
            self._measured, self._taken = self._room(), 0
        return self._measured - self._taken


def _give_back(heap: mmap.mmap, returned: deque[int], offset: int, size: int, owner: int) -> None:
    """Free the memory of a dead buffer, then make its range available again."""
    if os.getpid() == owner:  # a forked child has the array, too, but the memory is not the child's to free
        heap.madvise(_MADV_REMOVE, offset, size)
        returned.append(offset)


def _pointer_reader() -> Callable[[int], ctypes.c_size_t]:
    """Return a function that reads the pointer to an array's elements from behind the array's header.

    Every compiled extension reads it there (``PyArray_DATA``), so its place is fixed, and it takes a fifth of the time
    of ``__array_interface__``.  Where an ``id`` is not an address, no buffer is ever found: it is merely copied.
    """
    probe = np.zeros(1)
    has_addresses = sys.implementation.name == "cpython" and 2 * ctypes.sizeof(ctypes.c_size_t) == _HEADER
    if has_addresses and ctypes.c_size_t.from_address(id(probe) + _HEADER).value == probe.ctypes.data:
        return ctypes.c_size_t.from_address
    return lambda _: ctypes.c_size_t(0)
