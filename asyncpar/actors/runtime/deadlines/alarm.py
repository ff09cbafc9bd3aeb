"""Many times to wake up at, one timer."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SLACK: Final = 64


class AlarmClock(Generic[K]):
    """Calls ``ring(key)`` once for every key when its time has come.

    There is one timer for all keys, and none while no key is set.  Setting and dropping cost O(log n).
    """

    def __init__(self, ring: Callable[[K], None]) -> None:
        self._ring = ring
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Also holds what was set anew or dropped since, up to as much again as is set."""
        self._counter = 0
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: float | None = None

    @property
    def is_ticking(self) -> bool:
        """Is a timer set?"""
        return self._timer is not None

    @property
    def size(self) -> int:
        """Times that are kept, dropped ones included."""
        return len(self._heap)

    def set(self, key: K, when: float) -> None:
        """Ring for ``key`` at the loop time ``when``, instead of at the time that was set for it before."""
        self._times[key] = when
        self._counter += 1
        heapq.heappush(self._heap, (when, self._counter, key))
        self._arm()

    def drop(self, key: K) -> None:
        """Do not ring for ``key``."""
        if self._times.pop(key, None) is not None:
            self._arm()

    def clear(self) -> None:
        """Do not ring any more."""
        self._times.clear()
        self._arm()

    def _arm(self) -> None:
        if len(self._heap) > 2 * len(self._times) + _SLACK:
            self._heap = [entry for entry in self._heap if self._times.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        while self._heap and self._times.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        when = self._heap[0][0] if self._heap else None
        if when == self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = when
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._wake, when)

    def _wake(self, when: float) -> None:
        self._timer = self._armed_for = None
        now = max(when, asyncio.get_running_loop().time())  # a timer may fire a clock tick early
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            time, _, key = heapq.heappop(self._heap)
            if self._times.get(key) == time:
                del self._times[key]
                due.append(key)
        self._arm()
        for key in due:
            self._ring(key)
