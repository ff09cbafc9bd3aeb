"""The arrays of one operation of one size, their input values, and their expected results.  Pure.

Theory of operation.  Element ``i`` of the input of rank ``r`` is ``(i + 7 r) mod period``: small whole numbers, so that
results are exact in every dtype whatever the order of summation, and a period that is a prime, so that no chunk of a
power of two looks like its neighbour.  Arrays and results repeat with that period, so both are written and compared
through a few thousand elements of it, without a second array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from asyncpar.bench.settings import DTYPES, MANY_BYTES, REDUCING, ROOT, WHOLE
from asyncpar.core.config.names import ReduceOp

Array = NDArray[Any]
Allocate = Callable[[int, np.dtype[Any]], Array]

_STRIDE = 7
_PRIMES = (61, 31, 13, 7, 3)
_TILE = 1 << 14
_UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """``count`` elements, equal to those of ``rank`` from ``start`` on; None: those of all ranks combined."""

    rank: int | None
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation as one rank sees it.

    ``source`` is its input and ``target`` its result, the same array if the operation works in place.  If a rank has no
    input or result, the array is empty.  ``count`` is the number of elements of the whole buffer.
    """

    operation: str
    reduction: ReduceOp
    rank: int
    ranks: int
    count: int
    source: Array
    target: Array

    @property
    def share(self) -> int:
        """Elements per rank, if the buffer has a share for each."""
        return self.count // self.ranks

    @property
    def nbytes(self) -> int:
        return self.count * self.target.itemsize

    def pieces(self) -> list[Array]:
        """Return the source as small arrays."""
        step = MANY_BYTES // self.source.itemsize
        return [self.source[start : start + step] for start in range(0, self.source.size, step)]

    def fill(self) -> None:
        """Write the known values, and values that occur nowhere else in place of results."""
        if self.target is not self.source:
            self.target[...] = _filler(self.target.dtype)
        self._write(self.source, self._given())

    def clear(self) -> None:
        """Write zeros, which stay zeros however often they are combined."""
        self.source[...] = 0
        self.target[...] = 0

    def count_wrong(self) -> int:
        """Return the number of wrong elements in the result."""
        wrong, begin = 0, 0
        for expected in self._expected():
            tile = self._tile(expected)
            for start in range(begin, begin + expected.count, tile.size):
                part = self.target[start : min(start + tile.size, begin + expected.count)]
                wrong += int(np.count_nonzero(part != tile[: part.size]))
            begin += expected.count
        return wrong + (self.target.size - begin)

    def _given(self) -> list[ExpectedRange]:
        if self.operation == "broadcast" and self.rank != ROOT:
            return []
        return [ExpectedRange(self.rank, 0, self.source.size)]

    def _expected(self) -> list[ExpectedRange]:
        """Return the expected content of the target."""
        share, everyone = self.share, range(self.ranks)
        match self.operation:
            case "reduce" if self.rank != ROOT:
                return [ExpectedRange(self.rank, 0, self.count)]  # not changed
            case "all_reduce" | "all_reduce_many" | "reduce":
                return [ExpectedRange(None, 0, self.count)]
            case "reduce_scatter":
                return [ExpectedRange(None, self.rank * share, share)]
            case "broadcast":
                return [ExpectedRange(ROOT, 0, self.count)]
            case "scatter":
                return [ExpectedRange(ROOT, self.rank * share, share)]
            case "all_to_all":
                return [ExpectedRange(rank, self.rank * share, share) for rank in everyone]
        return [ExpectedRange(rank, 0, share) for rank in everyone] if self.target.size else []

    def _write(self, array: Array, ranges: list[ExpectedRange]) -> None:
        begin = 0
        if not ranges:
            array[...] = _filler(array.dtype)
        for expected in ranges:
            tile = self._tile(expected)
            for start in range(begin, begin + expected.count, tile.size):
                part = array[start : min(start + tile.size, begin + expected.count)]
                part[...] = tile[: part.size]
            begin += expected.count

    def _tile(self, expected: ExpectedRange) -> Array:
        """Return the first elements of ``expected``, whole periods of them, to be repeated."""
        period = period_of(self.source.dtype, self.ranks)
        ranks = np.arange(self.ranks) if expected.rank is None else np.array([expected.rank])
        values = (np.arange(period)[np.newaxis, :] + expected.start + _STRIDE * ranks[:, np.newaxis]) % period
        combined = _UFUNCS[self.reduction].reduce(values, axis=0)
        return np.tile(combined.astype(self.source.dtype), -(-min(_TILE, max(expected.count, 1)) // period))


def period_of(dtype: np.dtype[Any], ranks: int) -> int:
    """Return a period with which the sum over ``ranks`` ranks is exact in ``dtype``, as far as there is one."""
    most = _largest_exact(dtype) // ranks
    return next((period for period in _PRIMES if period - 1 <= most), 2)


def _largest_exact(dtype: np.dtype[Any]) -> int:
    """Return the number up to which all whole numbers exist in ``dtype``."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return int(2 ** (limits.nmant + 1))


def _filler(dtype: np.dtype[Any]) -> float:
    """Return a value that no result has."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if dtype.kind == "u" else limits.min
    return float("nan")


def count_elements(operation: str, size: int, *, ranks: int, itemsize: int) -> int:
    """Return the number of elements of a whole buffer of ``size`` bytes.

    If it is divided among ranks, it is rounded down to a multiple of them; it is at least one element or one per rank.
    """
    if operation == "barrier":
        return 0
    count = max(size // itemsize, 1)
    return count if operation in WHOLE else max(count // ranks, 1) * ranks


def make_case(
    operation: str,
    size: int,
    *,
    rank: int,
    ranks: int,
    dtype: str,
    reduction: ReduceOp = "sum",
    allocate: Allocate = np.empty,
) -> Case:
    """Allocate uninitialized arrays for a whole buffer of about ``size`` bytes; see ``count_elements``."""
    kind = np.dtype(DTYPES[dtype])
    count = count_elements(operation, size, ranks=ranks, itemsize=kind.itemsize)
    given, got = _lengths(operation, count, count // ranks, is_root=rank == ROOT)
    source = allocate(given, kind)
    target = source if operation in WHOLE else allocate(got, kind)
    return Case(
        operation=operation,
        reduction=reduction if operation in REDUCING else "sum",
        rank=rank,
        ranks=ranks,
        count=count,
        source=source,
        target=target,
    )


def _lengths(operation: str, whole: int, share: int, *, is_root: bool) -> tuple[int, int]:
    """Return the numbers of elements of a rank's input and result."""
    match operation:
        case "all_gather":
            return share, whole
        case "reduce_scatter":
            return whole, share
        case "gather":
            return share, whole if is_root else 0
        case "scatter":
            return whole if is_root else 0, share
    return whole, whole
