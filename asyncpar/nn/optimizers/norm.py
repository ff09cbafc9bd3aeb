"""Norms of gradients, equal to the last bit however gradients are distributed over ranks.

Squares are summed in float64 over the pieces into which partitions cut each gradient, and the sums of pieces are added
exactly, in any order: so replicas that hold whole gradients and owners of parts get equal norms, provided that they sum
the same pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array

_BLOCK = 1 << 15
"""Values that are squared at a time."""

_HALF = 2
_EXPONENTS = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
"""Bits that are all set in NaN and infinity, and in no other value."""


def squared_norm(piece: Array) -> float:
    """Return the sum of squares of a flat array; not finite if one of its values is not."""
    return combined(float(np.square(block).sum()) for block in _in_double(piece))


def combined(sums: Iterable[float]) -> float:
    """Return the sum of ``sums``, rounded once, whatever their order; infinite if it is too large."""
    listed = list(sums)
    try:
        return math.fsum(listed)
    except OverflowError:
        return math.inf


def all_finite(piece: Array) -> bool:
    """Return whether all values of a flat array are finite.

    The square of the norm shows this in one pass, unless it is too large for the dtype.
    """
    if piece.dtype.kind == "f" and piece.dtype.itemsize > 2:
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(piece, piece)):
                return True
    if piece.dtype.itemsize == _HALF:  # bits, because arithmetic in half precision is slow
        exponent = _EXPONENTS[piece.dtype.name]
        bits = piece.view(np.uint16)
        blocks = (bits[start : start + _BLOCK] for start in range(0, bits.size, _BLOCK))
        return all(bool(((block & exponent) != exponent).all()) for block in blocks)
    return all(bool(np.isfinite(block.min()) and np.isfinite(block.max())) for block in _blocks(piece))


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that reduces gradients of this global ``norm`` to at most ``limit``."""
    if not limit > 0.0:
        raise UsageError(f"clip_norm: expected a positive number, got {limit}")
    return 1.0 if norm <= limit else limit / norm


def _blocks(piece: Array) -> Iterable[Array]:
    for start in range(0, piece.size, _BLOCK):
        block = piece[start : start + _BLOCK]
        yield block if block.dtype.itemsize > 2 else block.astype(np.float32)


def _in_double(piece: Array) -> Iterable[np.ndarray[Any, np.dtype[np.float64]]]:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for block in _blocks(piece):
            yield block.astype(np.float64)
