"""Memory for buckets that are under way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import ArenaFull, UsageError
from asyncpar.gradsync.schemes.scheme import Empty
from asyncpar.zero.memory import TransientBytes

_KEPT = 8
"""Buffers of a dtype that wait to be used again: a bucket under way takes two, and four are under way."""


class BufferPool:
    """Lends arrays of undefined content, and takes them back.

    Where it ``reuses`` memory, ``empty`` makes it, such that ranks of one host can read it, and what was given back is
    lent again.
    """

    def __init__(self, empty: Empty, *, reuses: bool, bytes_held: TransientBytes) -> None:
        self._empty = empty
        self._reuses = reuses
        self._bytes_held = bytes_held
        self._free: dict[np.dtype[Any], list[NDArray[Any]]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Lent:
        """Lend an array."""
        count = math.prod(shape)
        free = self._free.get(dtype, [])
        fitting = [index for index, memory in enumerate(free) if memory.size >= count]
        if fitting:
            memory = free.pop(min(fitting, key=lambda index: free[index].size))
        else:
            memory = self._make(count, dtype)
            self._bytes_held.add(buffers=memory.nbytes)
        return Lent(memory, memory[:count].reshape(shape))

    def give_back(self, lent: Lent) -> None:
        """Take back what was lent and no rank reads any more; it may be lent again."""
        free = self._free.setdefault(lent.memory.dtype, [])
        if self._reuses:
            free.append(lent.memory)
        if not self._reuses or len(free) > _KEPT:
            dropped = free.pop(min(range(len(free)), key=lambda index: free[index].size)) if free else lent.memory
            self._bytes_held.add(buffers=-dropped.nbytes)

    def discard(self, lent: Lent) -> None:
        """Forget what was lent: others may still read it."""
        self._bytes_held.add(buffers=-lent.memory.nbytes)

    def clear(self) -> None:
        """Free all memory that waits to be used again."""
        for free in self._free.values():
            for memory in free:
                self._bytes_held.add(buffers=-memory.nbytes)
        self._free.clear()

    def _make(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if not self._reuses:
            return np.empty(count, dtype)
        try:
            return self._empty((count,), dtype)
        except (ArenaFull, UsageError):  # no room, or a dtype that it does not carry: ordinary memory does, too
            return np.empty(count, dtype)


class Lent:
    """An ``array`` in memory of a pool."""

    __slots__ = ("array", "memory")

    def __init__(self, memory: NDArray[Any], array: NDArray[Any]) -> None:
        self.memory = memory
        self.array = array


class Loans:
    """Arrays that were lent for one purpose and are given back together."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lent: list[Lent] = []

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array of undefined content."""
        lent = self._pool.take(shape, np.dtype(dtype))
        self._lent.append(lent)
        return lent.array

    def close(self, *, is_over: bool) -> None:
        """Give everything back; unless all ``is_over``, others may still read it, and it is not used again."""
        for lent in self._lent:
            (self._pool.give_back if is_over else self._pool.discard)(lent)
        self._lent = []
