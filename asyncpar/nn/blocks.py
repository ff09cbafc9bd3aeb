"""Blocks of arrays that layers go through several times."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK = 1 << 17
"""Values of a block: two of float32 fit into the second-level cache of a core."""


def blocks(count: int, each: int) -> Iterator[slice]:
    """Yield slices that cover ``count`` items of ``each`` values: of ``BLOCK`` values, or of one item that has more."""
    items = max(1, BLOCK // each)
    for start in range(0, count, items):
        yield slice(start, min(start + items, count))
