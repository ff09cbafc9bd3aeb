"""Process a vector once, in pieces that stay in the cache, with one scale per block of values.

Plain numpy runs near the speed of memory then.  Three things matter besides the cache.  Arithmetic in place is half as
fast again as arithmetic into a third array.  The magnitudes of floats are ordered as their bits are, as integers, of
which the largest is found twice as fast.  And where a row has one scale, numpy copies the scales into its buffer, value
by value, unless the buffer is as short as a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Values
from asyncpar.core.records import dataclass
from asyncpar.errors import NonFiniteValue

PIECE = 1 << 18
"""Values worked on at once: a MiB of float32.  With smaller ones, the calls take more than the cache saves."""

_INFINITY_BITS = 0x7F800000
_SIGN_BIT = 0x80000000


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A range of blocks of equal width in a vector, and of its values."""

    blocks: slice
    values: slice
    shape: tuple[int, int]
    """The number of blocks, and of values in each."""

    @property
    def size(self) -> int:
        """The number of values."""
        return self.shape[0] * self.shape[1]


def plan_pieces(count: int, block: int) -> Iterator[BlockRange]:
    """Yield the pieces of ``count`` values in blocks of ``block``: whole blocks, then a short last one alone."""
    whole, per_piece = count // block, PIECE // block
    for first in range(0, whole, per_piece):
        last = min(first + per_piece, whole)
        yield BlockRange(slice(first, last), slice(first * block, last * block), (last - first, block))
    if count % block:
        yield BlockRange(slice(whole, whole + 1), slice(whole * block, count), (1, count % block))


def count_blocks(count: int, block: int) -> int:
    """Return in how many blocks ``count`` values lie."""
    return -(-count // block)


def scratch(count: int) -> Values:
    """Return room for the largest piece of ``count`` values."""
    return np.empty(min(PIECE, count), np.float32)


@contextmanager
def row_buffers(block: int) -> Iterator[None]:
    """Make numpy's buffers, of this context, as long as a block."""
    before = np.setbufsize(block)
    try:
        yield
    finally:
        np.setbufsize(before)


def corrected(values: Values, residual: Values | None, lost: Values | None, part: slice, room: Values) -> Values:
    """Return ``part`` of ``values + residual``, perhaps not finite: in ``lost``, or else in ``room``, or as it is."""
    x = values[part]
    if residual is None and lost is None:
        return x
    total = room[: x.size] if lost is None else lost[part]
    if residual is None:
        np.copyto(total, x)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(x, residual[part], out=total)
    return total


def is_finite(x: Values) -> bool:
    """Is all of ``x`` finite?  As integers, infinity and NaN are the largest, without and with the sign."""
    positive, negative = x.view("<i4").max(initial=0), x.view("<u4").max(initial=0)
    return bool(positive < _INFINITY_BITS and negative < _SIGN_BIT | _INFINITY_BITS)


def largest_magnitudes(x: Values, room: Values) -> Values:
    """Return the largest magnitude in each row of ``x``; ``room`` is as large as ``x``.

    Raises ``NonFiniteValue`` for NaN or infinity.
    """
    np.abs(x, out=room)
    bits = np.maximum.reduceat(room.reshape(-1).view(np.int32), np.arange(0, x.size, x.shape[1]))
    if bits.max(initial=0) >= _INFINITY_BITS:
        raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
    return bits.view(np.float32)


def inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return one over each scale, zero for zero."""
    if scales.min(initial=1.0) > 0.0:
        return np.float32(1.0) / scales
    return np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > 0.0)
