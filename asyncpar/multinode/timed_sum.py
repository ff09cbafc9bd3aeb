"""Sums of rows whose times are kept."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from asyncpar.zero.row_sum import RowSum


class TimedSum(RowSum):
    """``inner``, which also appends to ``intervals`` when it was under way, once it has settled."""

    def __init__(self, inner: RowSum, intervals: list[tuple[float, float]], clock: Callable[[], float]) -> None:
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
