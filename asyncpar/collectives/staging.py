"""Memory for payloads on their way: taken, given back, and used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_SMALLEST = 64 << 10
KEPT_BYTES = 8 << 20


class StagingPool:
    """Lends byte arrays.  Keeps up to ``kept_bytes`` of those that came back, because fresh pages are slow."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._held = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of ``count`` elements, to be given back when nobody uses it any more."""
        length = count * dtype.itemsize
        if length < _SMALLEST:
            return np.empty(count, dtype)
        rounded = 1 << (length - 1).bit_length()
        free = self._free.get(rounded)
        if free:
            self._held -= rounded
            block = free.pop()
        else:
            block = np.empty(rounded, np.uint8)
        return block[:length].view(dtype)

    def give_back(self, array: npt.NDArray[Any]) -> None:
        """Take back an array from ``take``; no view of it may be in use."""
        block = array.base
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or block.nbytes < _SMALLEST:
            return
        if self._held + block.nbytes <= self._kept_bytes:
            self._held += block.nbytes
            self._free.setdefault(block.nbytes, []).append(block)


class Scratch:
    """Memory that is used within one step only, and therefore by all.  It grows to the largest step."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of ``count`` elements."""
        size = count * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype)
