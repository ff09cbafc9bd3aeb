"""Pseudo-random numbers that are equal on every machine and with every version of numpy.

Word ``i`` of a key is output ``i`` of SplitMix64 (Steele, Lea and Flood 2014) seeded with it: a function of a counter,
so no state is kept between calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def make_key(*numbers: int) -> int:
    """Return a 64-bit key that depends on the numbers, their order and their count."""
    key = len(numbers)
    for number in numbers:
        key = _mix((key ^ (number & _MASK)) + _GAMMA)
    return key


def check_seed(seed: int) -> int:
    """Return ``seed``, or raise ``UsageError`` if it is not an integer."""
    if type(seed) is not int:
        raise UsageError(f"seed: expected an integer, got {seed!r}")
    return seed


def draw_words(count: int, key: int) -> NDArray[np.uint64]:
    """Return ``count`` 64-bit words."""
    words = np.arange(1, count + 1, dtype=np.uint64)
    words *= np.uint64(_GAMMA)
    words += np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def draw_positions(count: int, size: int, key: int) -> NDArray[np.int64]:
    """Return ``count <= size`` different positions below ``size < 2**32``, ascending: one in each of as many strata.

    Stratum ``i`` is ``floor(i size / count) .. floor((i + 1) size / count) - 1``; in it, all positions are equally
    likely to within one part in 2**32.
    """
    edges = np.arange(count + 1, dtype=np.int64)
    edges *= size
    edges //= max(count, 1)
    draws = draw_words(count, key)
    draws >>= np.uint64(32)
    draws *= np.diff(edges).astype(np.uint64)
    draws >>= np.uint64(32)
    return edges[:-1] + draws.astype(np.int64)


def draw_uniform(count: int, key: int) -> NDArray[np.float32]:
    """Return ``count`` multiples of 2**-23 in -1..1, all equally likely."""
    words = draw_words(count, key) >> np.uint64(40)
    return words.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)


def _mix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)
