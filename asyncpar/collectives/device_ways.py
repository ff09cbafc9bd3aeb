"""The lines of ``algorithm_table`` about device arrays: the last ways of operations, for each range of sizes of a
pin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from asyncpar.collectives.policy import Pin, PinnedRange, format_bytes

_ALL: Final = (0.0, math.inf)


class DeviceWays:
    """The ways of one group: ``note`` records what an operation did, and ``lines`` describes it."""

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self._found: dict[str, dict[tuple[float, float], str]] = {}
        self.possible: dict[str, tuple[str, ...]] = {}
        """By used operation: the ways that it could have gone, as last known."""

    def note(self, name: str, way: str, payload: int | None = None, possible: tuple[str, ...] = ()) -> None:
        """Record that operation ``name`` on ``payload`` bytes went by ``way``, and the ``possible`` ways."""
        if possible:
            self.possible[name] = possible
        ranges = self._ranges(name)
        place = next((one for one in ranges if payload is not None and one[0] <= payload < one[1]), _ALL)
        self._found.setdefault(name, {})[place] = way

    def lines(self) -> Iterator[str]:
        """Yield a line for each operation that was used, and each range of sizes that is pinned for it."""
        for name, found in sorted(self._found.items()):
            for place, algorithm in self._ranges(name).items():
                mark = "*" if algorithm else ""
                way = found.get(place) or f"{algorithm or 'as NCCL can'}, not used yet"
                yield f"{name} of device arrays{_sizes(*place)}{mark}  {way}"
            if _ALL in found:
                yield f"{name} of device arrays  {found[_ALL]}"

    def _ranges(self, name: str) -> dict[tuple[float, float], str]:
        """Return the ranges that the pins distinguish, each with its algorithm, "" where none is pinned."""
        pinned: tuple[PinnedRange, ...] = self._pin.device_ranges.get(name, ())
        if not pinned or (pinned[0].low, pinned[0].high) == _ALL:
            return {}
        ranges: dict[tuple[float, float], str] = {}
        low = 0.0
        for one in pinned:
            if low < one.low:
                ranges[low, one.low] = ""
            ranges[one.low, one.high] = one.algorithm
            low = one.high
        if low < math.inf:
            ranges[low, math.inf] = ""
        return ranges


def _sizes(low: float, high: float) -> str:
    start = f" from {format_bytes(int(low))}" if low else ""
    return start if high == math.inf else f"{start} below {format_bytes(int(high))}"
