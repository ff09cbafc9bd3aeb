"""The arena's heaps as memory for large messages between the ranks of a host."""

from __future__ import annotations

import numpy as np

from asyncpar.arena.arena import Arena
from asyncpar.errors import ArenaFull, UsageError
from asyncpar.transport.shared import SharedMemory


class ArenaMemory(SharedMemory):
    """What links need of ``arena``."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def allocate(self, size: int) -> tuple[int, memoryview] | None:
        try:
            array = self._arena.empty(size, np.uint8)
        except (ArenaFull, UsageError):  # there is none, or a peer could not map it
            return None
        offset = self._arena.locate(array)
        return None if offset is None else (offset, array.data)

    def can_read(self, rank: int) -> bool:
        segment = self._arena.segments.get(rank)
        if segment is None:
            return False
        try:
            segment.heap()
        except UsageError:  # no room for it in this address space
            return False
        return True

    def is_gone(self, rank: int) -> bool:
        segment = self._arena.segments.get(rank)
        return segment is None or segment.has_left

    def read(self, rank: int, offset: int, size: int) -> memoryview:
        return self._arena.segments[rank].heap_array(offset, size, np.uint8).data
