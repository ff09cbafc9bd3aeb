"""Sums of rows whose times are kept."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from asyncpar.zero.buffers import BufferPool
from asyncpar.zero.feedback import RowFeedback
from asyncpar.zero.packing import Rows
from asyncpar.zero.row_sum import RowSum, RowSums

Intervals = list[tuple[float, float]]
"""Starts and ends, by the clock."""


class TimedSums(RowSums):
    """Sums as ``inner`` makes them, which append to what ``intervals`` returns when they are made."""

    def __init__(self, inner: RowSums, intervals: Callable[[], Intervals], clock: Callable[[], float]) -> None:
        self.is_lossy = inner.is_lossy
        self._inner = inner
        self._intervals = intervals
        self._clock = clock

    def make(self, rows: Rows, row: Rows, *, op: str, pool: BufferPool, feedback: RowFeedback | None) -> RowSum:
        inner = self._inner.make(rows, row, op=op, pool=pool, feedback=feedback)
        return TimedSum(inner, self._intervals(), self._clock)

    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:
        return self._inner.extra_bytes(rows, width, dtype)


class TimedSum(RowSum):
    """``inner``, which also appends to ``intervals`` when it was under way, once it has settled."""

    def __init__(self, inner: RowSum, intervals: Intervals, clock: Callable[[], float]) -> None:
        self.rows, self.row = inner.rows, inner.row
        self._inner = inner
        self._intervals = intervals
        self._clock = clock
        self._start = 0.0

    def prepare(self) -> None:
        self._start = self._clock()
        self._inner.prepare()

    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        return self._inner.begin(key)

    def give_up(self, key: str) -> None:
        self._inner.give_up(key)

    def settle(self) -> None:
        self._inner.settle()
        self._intervals.append((self._start, self._clock()))

    def close(self, *, is_over: bool) -> None:
        self._inner.close(is_over=is_over)
