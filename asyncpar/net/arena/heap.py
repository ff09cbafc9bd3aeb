"""Allocation of the heap: a list of free ranges, first fit.  Pure."""

from __future__ import annotations

from bisect import bisect_left


class FreeRanges:
    """Divides ``capacity`` bytes into ranges whose bounds are multiples of ``granularity``.

    Allocation takes the lowest range that is large enough (first fit, Knuth, TAOCP 1, 2.5), so that used ranges stay
    together; free neighbours are joined at once.  The cost is linear in the number of holes.
    """

    def __init__(self, *, capacity: int, granularity: int) -> None:
        assert granularity > 0, "a granularity is positive"
        self._granularity = granularity
        self._free = [(0, capacity - capacity % granularity)] if capacity >= granularity else []
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Free bytes."""
        return sum(end - start for start, end in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - start for start, end in self._free), default=0)

    def round_up(self, size: int) -> int:
        """Return the number of bytes that a request for ``size`` takes."""
        return -(-size // self._granularity) * self._granularity

    def allocate(self, size: int) -> int | None:
        """Allocate a range of at least ``size`` bytes, 1 or more, and return where it starts; None: there is none."""
        assert size > 0, "an allocation has at least one byte"
        size = self.round_up(size)
        for place, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[place : place + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = size
                return start
        return None

    def release(self, start: int) -> int:
        """Free the range that starts at ``start`` and return its size."""
        size = self._taken.pop(start)
        end = start + size
        place = bisect_left(self._free, (start, end))
        first = last = place
        if place < len(self._free) and self._free[place][0] == end:
            end, last = self._free[place][1], place + 1
        if place > 0 and self._free[place - 1][1] == start:
            start, first = self._free[place - 1][0], place - 1
        self._free[first:last] = [(start, end)]
        return size
