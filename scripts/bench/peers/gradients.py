"""The gradients of ``link.py``, and the rules by which each side is timed on them: the same for us and for torch.

Also runs in the peers' environments, where asyncpar is not installed: numpy and the standard library only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LAYERS = 24
WARM_UP = 3
"""Synchronizations before those that count: torch's PowerSGD begins with its third at the earliest."""

LEAST_ITERATIONS = 3
MOST_ITERATIONS = 50

_SEED = 20_260_717

Values = np.ndarray[Any, np.dtype[np.float32]]


def shapes(count: int) -> list[tuple[int, ...]]:
    """Return the shapes of parameters of ``count`` values together: square matrices, each with what is left over."""
    bounds = np.linspace(0, count, LAYERS + 1, dtype=np.int64)
    found: list[tuple[int, ...]] = []
    for layer in np.diff(bounds).tolist():
        side = math.isqrt(layer)
        found += [(side, side)] if side else []
        found += [(layer - side * side,)] if layer > side * side else []
    return found


def draw(count: int, rank: int) -> Values:
    """Return one rank's gradients of all parameters, one after another.

    What ranks have in common has heavy tails (products of two normal numbers, kurtosis 9), each rank adds noise of half
    its size, and layers differ in scale by up to a factor of 100.
    """
    rng = np.random.default_rng(_SEED)
    values = rng.standard_normal(count, np.float32)
    values *= rng.standard_normal(count, np.float32)
    scales = 10.0 ** rng.uniform(-3.0, -1.0, len(shapes(count)))
    values += np.float32(0.5) * np.random.default_rng((_SEED, rank)).standard_normal(count, np.float32)
    start = 0
    for shape, scale in zip(shapes(count), scales, strict=True):
        stop = start + math.prod(shape)
        values[start:stop] *= np.float32(scale)
        start = stop
    return values


def mean(count: int, ranks: int) -> Values:
    """Return the mean over ranks."""
    total = draw(count, 0).astype(np.float64)
    for rank in range(1, ranks):
        total += draw(count, rank)
    return (total / ranks).astype(np.float32)


def split(values: Values, count: int) -> list[Values]:
    """Return views of ``values``, one of each shape."""
    parts, start = [], 0
    for shape in shapes(count):
        stop = start + math.prod(shape)
        parts.append(values[start:stop].reshape(shape))
        start = stop
    return parts


def iterations(once: float, budget: float) -> int:
    """Return how many synchronizations that take ``once`` seconds fill ``budget`` seconds, within limits."""
    return int(min(max(budget / max(once, 1e-9), LEAST_ITERATIONS), MOST_ITERATIONS))
