"""Memory for buckets in progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import ArenaFull, UsageError
from asyncpar.gradsync.schemes.scheme import Empty
from asyncpar.zero.memory import TransientBytes
from asyncpar.zero.partition import Widths, served_width


class BufferPool:
    """Lends uninitialized arrays, and takes them back.

    If it ``reuses`` memory, ``empty`` allocates it such that ranks of one host can read it, and returned memory is lent
    again.  Rows of ``usual`` widths have memory for the widest of them, so that the memory of one bucket fits the next
    one.  ``loans`` are the numbers of matrices of rows and of single rows that a bucket takes.
    """

    def __init__(
        self,
        empty: Empty,
        *,
        reuses: bool,
        bytes_held: TransientBytes,
        usual: Widths = MappingProxyType({}),
        loans: tuple[int, int] = (1, 1),
    ) -> None:
        self._empty = empty
        self._reuses = reuses
        self._bytes_held = bytes_held
        self._usual = usual
        self._loans = loans
        self._usual_counts: set[tuple[np.dtype[Any], int]] = set()
        self._narrow_counts: set[tuple[np.dtype[Any], int]] = set()
        self._free: dict[np.dtype[Any], list[NDArray[Any]]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Lent:
        """Lend an array."""
        count = math.prod(shape)
        memory = self._find(shape, dtype)
        if memory is None:
            memory = self._make(self.count_for(shape, dtype), dtype)
            self._bytes_held.add(buffers=memory.nbytes)
        return Lent(memory, memory[:count].reshape(shape))

    def count_for(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return the capacity, in values, of the memory allocated for ``shape``."""
        return math.prod(shape[:-1]) * served_width(shape[-1], dtype, self._usual)

    def give_back(self, lent: Lent) -> None:
        """Take back an array that no rank reads any more; it may be lent again."""
        if self._reuses:
            self._free.setdefault(lent.memory.dtype, []).append(lent.memory)
        else:
            self._bytes_held.add(buffers=-lent.memory.nbytes)

    def discard(self, lent: Lent) -> None:
        """Forget a lent array that others may still read."""
        self._bytes_held.add(buffers=-lent.memory.nbytes)

    def trim(self, buckets: int) -> None:
        """Free idle memory beyond the needs of so many ``buckets``, and memory narrower than usual."""
        for dtype, free in self._free.items():
            kept: list[NDArray[Any]] = []
            counts = Counter[int]()
            for memory in sorted(free, key=len, reverse=True):
                kind, most = self._kind(dtype, memory.size)
                counts[kind] += 1
                if counts[kind] <= most * buckets:
                    kept.append(memory)
            self._bytes_held.add(buffers=_nbytes(kept) - _nbytes(free))
            free[:] = kept

    def clear(self) -> None:
        """Free all idle memory."""
        for free in self._free.values():
            self._bytes_held.add(buffers=-_nbytes(free))
        self._free.clear()

    def _find(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return the smallest idle memory that fits; if none does, drop the largest to make room for new memory."""
        free = self._free.get(dtype, [])
        wanted = self.count_for(shape, dtype)
        if shape[-1] in self._usual.get(dtype, ()):
            self._usual_counts.add((dtype, wanted))
            place = next((index for index, memory in enumerate(free) if memory.size == wanted), None)
            return None if place is None else free.pop(place)
        if shape[-1] < self._usual.get(dtype, range(0)).start:
            self._narrow_counts.add((dtype, wanted))
        others = [index for index, memory in enumerate(free) if (dtype, memory.size) not in self._usual_counts]
        fitting = [index for index in others if free[index].size >= wanted]
        if fitting:
            return free.pop(min(fitting, key=lambda index: free[index].size))
        if others:
            self._bytes_held.add(buffers=-free.pop(max(others, key=lambda index: free[index].size)).nbytes)
        return None

    def _kind(self, dtype: np.dtype[Any], count: int) -> tuple[int, int]:
        """Return a key that separates memory for different needs, and the most loans of it per bucket."""
        if (dtype, count) in self._narrow_counts:
            return -1, 0
        if (dtype, count) not in self._usual_counts:
            return 0, 2
        rows, single = self._loans
        return count, single if count == self._usual[dtype][-1] else rows

    def _make(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if not self._reuses:
            return np.empty(count, dtype)
        try:
            return self._empty((count,), dtype)
        except (ArenaFull, UsageError):  # no room, or an unsupported dtype: ordinary memory will do
            return np.empty(count, dtype)


def _nbytes(arrays: Iterable[NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays)


class Lent:
    """An ``array`` in memory of a pool."""

    __slots__ = ("array", "memory")

    def __init__(self, memory: NDArray[Any], array: NDArray[Any]) -> None:
        self.memory = memory
        self.array = array


class Loans:
    """Arrays that are lent for one purpose and returned together."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lent: list[Lent] = []

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an uninitialized array."""
        lent = self._pool.take(shape, np.dtype(dtype))
        self._lent.append(lent)
        return lent.array

    def close(self, *, is_over: bool) -> None:
        """Return everything; unless all ``is_over``, others may still read it, and it is not reused."""
        for lent in self._lent:
            (self._pool.give_back if is_over else self._pool.discard)(lent)
        self._lent = []
