"""Products of parameters: by default a sample in which each pair of values still meets, the whole with ``--soak``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

from tests.soak import is_soak


def sampled(*axes: Sequence[Any], where: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return the product of ``axes``, or few of its rows that hold every value, and every two values of two axes.

    ``where`` says of the values of a row whether there is such a case (None: all are).  The rows are the same in every
    run, and in the order of the product: xdist's workers must collect the same tests.
    """

    def values(row: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(axis[index] for axis, index in zip(axes, row, strict=True))

    rows = [row for row in product(*(range(len(axis)) for axis in axes)) if where is None or where(*values(row))]
    if not is_soak() and len(axes) > 2:
        rows = sorted(_covering(rows))
    return [values(row) for row in rows]


def in_turn(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return as many rows as the longest axis has values, so that each value occurs; the product with ``--soak``.

    For what is expensive, and where values of different axes have little to do with each other.
    """
    lists = [list(axis) for axis in axes]
    if is_soak():
        return list(product(*lists))
    longest = max(map(len, lists))
    return [
        tuple(values[(row + row // len(values) * (place > 0)) % len(values)] for place, values in enumerate(lists))
        for row in range(longest)
    ]


def _covering(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return rows that hold all pairs: always the one that has most of those that are missing."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set[tuple[tuple[int, int], ...]]().union(*pairs.values())
    chosen: list[tuple[int, ...]] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
