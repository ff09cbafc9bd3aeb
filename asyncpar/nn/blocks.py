"""Blocks of arrays over which layers make several passes."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK = 1 << 17
"""Values per block: two blocks of float32 fit into the second-level cache of a core."""


def blocks(count: int, each: int) -> Iterator[slice]:
    """Yield slices that cover ``count`` items of ``each`` values: of ``BLOCK`` values, or of one item if larger."""
    items = max(1, BLOCK // each)
    for start in range(0, count, items):
        yield slice(start, min(start + items, count))
