"""Memory for large arrays, reused once nothing refers to it.

Theory of operation.  Fresh memory is slow: the system clears every page when it is first touched.  So arrays are lent
as views of larger blocks, and when the last array, view or memoryview of a block is gone, the block comes back, from
whichever thread dropped it.  A program that still holds a result keeps its memory: nothing is taken back.

The end of the last view is detected by the end of a *lease*, which arrays see as the owner of the block.  It is a
ctypes array, because a numpy array would be skipped: an array on a view of an array refers to the innermost one.

Finalizers run anywhere, even in the middle of an allocation, so they take no lock: they append to a queue (atomic).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

LEAST_BYTES: Final = 256 * 1024
"""Smaller arrays come from malloc, which keeps its memory warm."""

Block: TypeAlias = NDArray[np.uint8]


def lend(block: Block, take_back: Callable[[Block], object]) -> tuple[Any, weakref.finalize[..., Any]]:
    """Return a buffer on ``block``, and the finalizer that passes ``block`` to ``take_back`` once the buffer is unused.

    ``take_back`` is called in any thread, and must take no lock.
    """
    lease = (ctypes.c_ubyte * block.nbytes).from_buffer(block.data)
    returning: weakref.finalize[..., Any] = weakref.finalize(lease, take_back, block)
    returning.atexit = False
    return lease, returning


class ArrayPool:
    """Lends arrays from any thread; those of ``LEAST_BYTES`` or more reuse memory that was lent before, if it fits.

    ``most_idle`` returns how many bytes may wait to be reused; None: as many as bring the pool's total to the most that
    was lent at once.  A copy of a pool is a pool that keeps nothing.

    With ``is_mapped`` blocks are mapped from the system one by one, and dropped ones return to it at once; otherwise
    the C library keeps some of that memory for later allocations.
    """

    def __init__(self, most_idle: Callable[[], int] | None = lambda: 0, *, is_mapped: bool = False) -> None:
        self.blocks_made = 0
        """Blocks taken from the system so far."""
        self.lent_bytes = 0
        """Bytes that were lent at the pool's last check."""
        self.most_lent_bytes = 0
        """The largest ``lent_bytes`` so far."""
        self._most_idle = most_idle
        self._make = _map_block if is_mapped else _allocate_block
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()
        self._idle: list[Block] = []

    def __reduce__(self) -> tuple[type[ArrayPool], tuple[()]]:
        return ArrayPool, ()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array of undefined content."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < LEAST_BYTES:
            return np.empty(shape, kind)
        lease, _ = lend(self._take(nbytes), self._returned.append)
        return np.ndarray(shape, kind, buffer=lease)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array of zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def trim(self, most: int | None = None) -> None:
        """Release idle memory beyond ``most_idle``, and beyond ``most`` bytes if given, to the system."""
        with self._lock:
            self._sort_in()
            if most is not None:
                self._drop_beyond(most)

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be reused."""
        with self._lock:
            self._sort_in()
            return sum(block.nbytes for block in self._idle)

    def _take(self, nbytes: int) -> Block:
        """Return a block of exactly ``nbytes``, the one returned last: it is warm."""
        with self._lock:
            self._sort_in(without_limit=True)
            for place in reversed(range(len(self._idle))):
                if self._idle[place].nbytes == nbytes:
                    self._count(nbytes)
                    return self._idle.pop(place)
            self._drop_beyond(self._limit() - nbytes)
            self._count(nbytes)
            self.blocks_made += 1
        return self._make(nbytes)

    def _sort_in(self, *, without_limit: bool = False) -> None:
        while self._returned:
            block = self._returned.popleft()
            self.lent_bytes -= block.nbytes
            self._idle.append(block)
        if not without_limit:
            self._drop_beyond(self._limit())

    def _count(self, nbytes: int) -> None:
        self.lent_bytes += nbytes
        self.most_lent_bytes = max(self.most_lent_bytes, self.lent_bytes)

    def _limit(self) -> int:
        return self.most_lent_bytes - self.lent_bytes if self._most_idle is None else self._most_idle()

    def _drop_beyond(self, most: int) -> None:
        """Drop the blocks idle for longest until the others have at most ``most`` bytes."""
        idle = sum(block.nbytes for block in self._idle)
        while self._idle and idle > most:
            idle -= self._idle.pop(0).nbytes


_HUGE_BYTES = 4 << 20
"""From this size on numpy asks for huge pages, too."""

_HUGE_PAGE = 2 << 20
"""The usual size; where huge pages are larger, none are used."""

_MOST_SPARE = 32
"""At most this fraction (1/n) of a block is taken beyond its end."""


def _allocate_block(nbytes: int) -> Block:
    return np.empty(nbytes, np.uint8)


def _map_block(nbytes: int) -> Block:
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # elsewhere memory without a file is private to start with
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    return _map_huge_pages(nbytes, flags)


def _map_huge_pages(nbytes: int, flags: int) -> Block:
    """Map a block that begins on a huge page; ordinary pages hold the rest if another huge one would be mostly empty.

    Otherwise a block would begin anywhere: it would have two fewer huge pages, and a thousand more faults each time it
    is made.
    """
    mapped = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE, flags=flags)  # untouched memory takes no space
    whole = np.frombuffer(mapped, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    filled = nbytes // _HUGE_PAGE * _HUGE_PAGE
    spare = filled + _HUGE_PAGE - nbytes
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE, start, filled + _HUGE_PAGE if spare <= nbytes // _MOST_SPARE else filled)
    return whole[start : start + nbytes]
