"""Tensors in memory that the ranks of a host share, which is kept for reuse.

Mapping and freeing memory takes longer than the copy that shared memory saves, so memory whose tensors are gone is
kept, by size: programs allocate tensors of the same sizes in every step.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncpar.errors import ArenaFull
from asyncpar.torch.arrays import tensor_of


class SharedTensors:
    """Makes tensors of memory that ``allocate`` returns for a number of bytes; callable from any thread."""

    def __init__(self, allocate: Callable[[int], NDArray[Any]]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._kept: defaultdict[int, list[NDArray[Any]]] = defaultdict(list)
        self._returned: deque[NDArray[Any]] = deque()
        """Memory whose tensors are gone; they may vanish in any thread, even in the middle of ``empty``."""

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized vector, in ordinary memory if there is no shared memory left."""
        nbytes = count * dtype.itemsize
        if not nbytes:
            return torch.empty(count, dtype=dtype)
        memory = self._take(nbytes)
        if memory is None:
            return torch.empty(count, dtype=dtype)
        lent = memory[:]
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return tensor_of(lent).view(dtype)

    def clear(self) -> None:
        """Release the memory whose tensors are gone."""
        with self._lock:
            self._kept.clear()
            self._returned.clear()

    def _take(self, nbytes: int) -> NDArray[np.uint8] | None:
        with self._lock:
            self._sort()
            if self._kept[nbytes]:
                return self._kept[nbytes].pop()
        try:
            return self._allocate(nbytes)
        except ArenaFull:
            self.clear()
        try:
            return self._allocate(nbytes)
        except ArenaFull:
            return None

    def _sort(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._kept[memory.nbytes].append(memory)
