"""Free ranges: never the same byte twice, never a byte lost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.net.arena.heap import FreeRanges

PAGE = 16


@dataclass(frozen=True)
class Taken:
    start: int
    size: int


@given(
    capacity=st.integers(0, 40 * PAGE),
    requests=st.lists(st.tuples(st.booleans(), st.integers(1, 12 * PAGE)), max_size=60),
)
def test_whatever_is_asked_ranges_are_aligned_and_apart_and_all_bytes_are_accounted_for(
    capacity: int, requests: list[tuple[bool, int]]
) -> None:
    ranges = FreeRanges(capacity=capacity, granularity=PAGE)
    usable = capacity // PAGE * PAGE
    taken: list[Taken] = []
    for releases, number in requests:
        if releases and taken:
            one = taken.pop(number % len(taken))
            assert ranges.release(one.start) == one.size
        elif not releases:
            largest = ranges.largest
            start = ranges.allocate(number)
            size = ranges.round_up(number)
            assert (start is None) == (size > largest)
            if start is not None:
                taken.append(Taken(start, size))
        taken.sort(key=lambda one: one.start)
        assert all(one.start % PAGE == 0 and one.size % PAGE == 0 for one in taken)
        assert all(one.start + one.size <= other.start for one, other in pairwise(taken))
        assert all(one.start >= 0 and one.start + one.size <= usable for one in taken)
        assert ranges.free == usable - sum(one.size for one in taken)
        assert ranges.largest == max(_gaps(taken, usable), default=0)


def _gaps(taken: list[Taken], usable: int) -> list[int]:
    """What free neighbours joined must give."""
    bounds = [0, *(bound for one in taken for bound in (one.start, one.start + one.size)), usable]
    return [end - start for start, end in zip(bounds[::2], bounds[1::2], strict=True)]


def test_the_lowest_range_that_is_large_enough_is_taken() -> None:
    ranges = FreeRanges(capacity=10 * PAGE, granularity=PAGE)
    assert [ranges.allocate(2 * PAGE) for _ in range(5)] == [place * PAGE for place in (0, 2, 4, 6, 8)]
    ranges.release(2 * PAGE)
    ranges.release(6 * PAGE)
    assert ranges.allocate(PAGE) == 2 * PAGE
    assert ranges.allocate(2 * PAGE) == 6 * PAGE


def test_what_nobody_took_cannot_be_released() -> None:
    ranges = FreeRanges(capacity=4 * PAGE, granularity=PAGE)
    ranges.allocate(2 * PAGE)
    with pytest.raises(KeyError):
        ranges.release(PAGE)
