"""Slices of arrays over which layers make several passes."""

from __future__ import annotations

from collections.abc import Iterator

SLICE = 1 << 17
"""Values per slice: two slices of float32 fit into the second-level cache of a core."""


def slices(count: int, each: int) -> Iterator[slice]:
    """Yield slices that cover ``count`` items of ``each`` values: of ``SLICE`` values, or of one item if larger."""
    items = max(1, SLICE // each)
    for start in range(0, count, items):
        yield slice(start, min(start + items, count))
