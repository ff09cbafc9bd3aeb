"""Select the largest of many values, exactly, in little more than one pass.

A sample yields a threshold above which a few more values lie than are wanted; one pass in cache-sized blocks collects
those, and the surplus is dropped.  If the sample misled (a share of 1e-4 of random vectors, and adversarial vectors),
two more passes find the exact threshold by the digits of the values, and another one collects.

Magnitudes are compared by their bits as integers: the order is that of the numbers, NaN and infinity come last and are
always among those collected, so no extra pass is needed to find them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Values
from asyncpar.codecs.corrected import BLOCK, Corrected
from asyncpar.codecs.draw import draw_positions
from asyncpar.errors import NonFiniteValue

_FEW = 1 << 14
"""Number of values up to which the exact threshold is as fast as a sampled one."""
_LARGEST_SAMPLE = 1 << 16
_VALUES_PER_DRAW = 64
_DOUBT = 4.0
"""Number of standard deviations by which the sampled threshold is lowered, so that enough values are left."""
_SIGN = np.int32(0x7FFFFFFF)
_INFINITY = 0x7F800000
_DIGIT = 16


@dataclass(frozen=True, slots=True)
class Entries:
    """Selected values of a vector: their number per block of 65,536, their ascending offsets there, and the values."""

    counts: NDArray[np.int64]
    offsets: NDArray[np.uint16]
    values: Values

    @property
    def positions(self) -> NDArray[np.int64]:
        """Their positions in the whole vector."""
        return find_positions(self.counts, self.offsets)

    def largest(self, count: int) -> Entries:
        """Return the ``count`` values of largest magnitude, the first among equals, or all if there are no more."""
        surplus = self.values.size - count
        if surplus <= 0:
            return self
        magnitudes = self.values.view(np.int32) & _SIGN
        threshold = np.partition(magnitudes, surplus)[surplus]
        kept = magnitudes > threshold
        equal = np.flatnonzero(magnitudes == threshold)
        kept[equal[: count - np.count_nonzero(kept)]] = True
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept, dtype=np.int64)])
        counts = np.diff(before[np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])])
        return Entries(counts, self.offsets[kept], self.values[kept])


def find_positions(counts: NDArray[np.int64], offsets: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the positions of ``offsets``, the first ``counts[0]`` of which lie in block 0, and so on."""
    positions = np.repeat(np.arange(counts.size, dtype=np.int64) * BLOCK, counts)
    positions += offsets
    return positions


def select_largest(source: Corrected, count: int) -> Entries:
    """Return the ``0 < count <= source.size`` nonzero values of largest magnitude, the first among equals.

    Raises ``NonFiniteValue`` for NaN or infinity anywhere.
    """
    if source.size <= _FEW:
        everything = _magnitudes(source.take(np.arange(source.size)))
        floor = max(int(np.partition(everything, source.size - count)[source.size - count]), 1)
        limit = source.size
    else:
        floor, limit = _guess_floor(source, count)
    found = _collect(source, floor, limit=limit)
    if found is None or (found.values.size < count and floor > 1):
        floor, ties = _find_floor(source, count)
        found = _collect(source, floor, limit=source.size, ties=ties)
        assert found is not None, "there are no more entries than values"
    return found.largest(count)


def _guess_floor(source: Corrected, count: int) -> tuple[int, int]:
    """Return a magnitude that the ``count`` largest likely reach, and more entries than likely reach it."""
    size = min(max(source.size // _VALUES_PER_DRAW, _FEW // 4), _LARGEST_SAMPLE)
    sample = _magnitudes(source.take(draw_positions(size, source.size, key=0)))
    expected = count / source.size * size
    rank = ceil(expected + _DOUBT * sqrt(expected)) + 1
    limit = 2 * rank * source.size // size + BLOCK
    if rank >= size:
        return 1, source.size
    floor = int(np.partition(sample, size - rank)[size - rank])
    return min(max(floor, 1), _INFINITY - 1), limit


def _collect(source: Corrected, floor: int, *, limit: int, ties: int | None = None) -> Entries | None:
    """Return all values of magnitude ``floor`` or above; of those equal to it only the first ``ties``, if given.

    Return None if there are more than ``limit``.
    """
    counts: list[int] = []
    offsets: list[NDArray[np.uint16]] = []
    values: list[Values] = []
    scratch, flags = np.empty(min(BLOCK, source.size), np.int32), np.empty(min(BLOCK, source.size), np.bool_)
    for x in source.pieces():
        if limit < 0:
            continue
        magnitudes = np.bitwise_and(x.view(np.int32), _SIGN, out=scratch[: x.size])
        found = np.flatnonzero(np.greater_equal(magnitudes, floor, out=flags[: x.size]))
        if ties is not None:
            equal = np.flatnonzero(magnitudes[found] == floor)
            found = np.delete(found, equal[ties:])
            ties = max(ties - equal.size, 0)
        limit -= found.size
        counts.append(found.size)
        offsets.append(found.astype(np.uint16))
        values.append(x[found])
    if limit < 0:
        return None
    entries = Entries(np.array(counts, np.int64), np.concatenate(offsets), np.concatenate(values))
    if (_magnitudes(entries.values) >= _INFINITY).any():
        raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
    return entries


def _find_floor(source: Corrected, count: int) -> tuple[int, int]:
    """Return the exact magnitude of the last of the ``count`` largest, and how many of those are equal to it.

    Two passes, each over one digit of 16 bits, the high one first.  A magnitude of 0 counts as 1.
    """
    high = np.zeros(1 << _DIGIT, np.int64)
    for x in source.pieces():
        high += np.bincount(_magnitudes(x) >> _DIGIT, minlength=high.size)
    if high[_INFINITY >> _DIGIT :].any():
        raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
    first, missing = _find_digit(high, count)
    low = np.zeros(1 << _DIGIT, np.int64)
    for x in source.pieces():
        magnitudes = _magnitudes(x)
        alike = magnitudes[magnitudes >> _DIGIT == first]
        low += np.bincount(alike & ((1 << _DIGIT) - 1), minlength=low.size)
    second, ties = _find_digit(low, missing)
    floor = (first << _DIGIT) + second
    return (floor, ties) if floor else (1, source.size)


def _find_digit(histogram: NDArray[np.int64], count: int) -> tuple[int, int]:
    """Return the digit of the last of the ``count`` largest, and how many of these have it."""
    at_least = np.cumsum(histogram[::-1])[::-1]
    digit = int(np.flatnonzero(at_least >= count)[-1])
    return digit, count - int(at_least[digit] - histogram[digit])


def _magnitudes(values: Values) -> NDArray[np.int32]:
    """Return the bits without the sign, as integers."""
    return values.view(np.int32) & _SIGN
