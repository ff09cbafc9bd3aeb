"""Memory for large messages, reused once no array refers to it.

Theory of operation.  Fresh memory is slow: the system clears every page when it is first touched, which can take as
long as the transfer of the bytes.  So memory is lent as a view on a larger block, and when the last array on the view
is gone, the block comes back, from whichever thread dropped it, and waits for a message of about its size.  Memory that
has not been reused for a while goes back to the system.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.array_pool import LEAST_BYTES, Block, lend
from asyncpar.net.wire.frame import allocate
from asyncpar.net.wire.payload import ALIGNMENT

MOST_BYTES: Final = 80 << 20
MOST_BLOCKS: Final = 4
"""So at most 320 MiB wait to be reused, for ``KEEP_SECONDS`` to twice as long."""

KEEP_SECONDS: Final = 5.0


class MemoryPool:
    """Lends memory on the running loop.  Lent memory stays valid as long as anything refers to it."""

    def __init__(self) -> None:
        self._idle: deque[Block] = deque(maxlen=MOST_BLOCKS)
        self._aging: deque[Block] = deque(maxlen=MOST_BLOCKS)
        """Blocks that were already idle at the last check."""
        self._leases: list[weakref.finalize[..., Any]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be reused."""
        return sum(block.nbytes for block in (*self._idle, *self._aging))

    def allocate(self, length: int) -> memoryview:
        """Return writable memory of ``length`` bytes; its content is undefined."""
        if not LEAST_BYTES <= length <= MOST_BYTES or self._is_closed:
            return allocate(length)
        size = _round_up(length)
        block = _take(self._idle, size)
        if block is None:
            block = _take(self._aging, size)
        if block is None:
            block = np.empty(size + ALIGNMENT, np.uint8)
        lease, returning = lend(block, self._idle.append)
        self._leases.append(returning)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._age)
        start = -ctypes.addressof(lease) % ALIGNMENT
        return memoryview(lease).cast("B")[start : start + length]

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a C-contiguous array of undefined content; from a thread without a loop, in memory of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not LEAST_BYTES <= nbytes <= MOST_BYTES or not self._is_at_home():
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer=self.allocate(nbytes))

    def close(self) -> None:
        """Free idle memory, and keep none from then on.  Idempotent."""
        self._is_closed = True
        self._idle = deque(maxlen=0)
        self._aging.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _is_at_home(self) -> bool:
        """Return whether this is the loop on which memory was first lent."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._loop = self._loop or loop
        return loop is self._loop

    def _age(self) -> None:
        """Release to the system the blocks that were already idle at the last check."""
        self._aging.clear()
        while self._idle:
            self._aging.append(self._idle.popleft())
        self._leases = [returning for returning in self._leases if returning.alive]
        is_idle = not self._leases and not self._aging
        self._timer = None if is_idle else asyncio.get_running_loop().call_later(KEEP_SECONDS, self._age)


def _take(blocks: deque[Block], size: int) -> Block | None:
    """Remove and return a block for ``size`` bytes.  Others may append meanwhile; nothing here depends on a count."""
    for _ in range(len(blocks)):
        block = blocks.popleft()
        if block.nbytes == size + ALIGNMENT:
            return block
        blocks.append(block)
    return None


def _round_up(length: int) -> int:
    """Return the next size class: eight of them for each power of two."""
    step = 1 << max(length.bit_length() - 4, 0)
    return -(-length // step) * step
