"""Products of parameters: by default a sample in which each pair of values still meets, the whole on request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

IS_WHOLE = bool(os.environ.get("ASYNCPAR_TEST_ALL"))
"""Set ``ASYNCPAR_TEST_ALL=1`` to run every case of everything that is sampled otherwise."""


def sampled(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the product of ``axes``, or few of its rows that hold every value, and every two values of two axes.

    The rows are the same in every run, and in the order of the product: xdist's workers must collect the same tests.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    if not IS_WHOLE and len(axes) > 2:
        rows = sorted(_covering(rows))
    return [tuple(axis[index] for axis, index in zip(axes, row, strict=True)) for row in rows]


def _covering(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return rows that hold all pairs: always the one that has most of those that are missing."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set[tuple[tuple[int, int], ...]]().union(*pairs.values())
    chosen: list[tuple[int, ...]] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
