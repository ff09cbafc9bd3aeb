"""Linear algebra of PowerSGD; results that all ranks compute must be equal bit by bit.

Matrix products of a BLAS are not: kernels, and with them the order of sums, differ between processors.  The part that
every rank computes for itself from the same means therefore consists of numpy's elementwise operations and of its sums
of contiguous vectors, which round alike on every machine of one floating-point standard and one version of numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Values

_DEPENDENT = 2.0**-20
"""Remaining share of a row after projecting out the others below which it is rounding noise of float32."""
_PIECE = 1 << 16


def orthonormalize(rows: Values, spare: Values | None = None) -> Values:
    """Return rows, orthonormal to float32, with the same span as the finite ``rows``; the same bits everywhere.

    Gram-Schmidt in float64, each row twice (Giraud et al. 2005).  A row that is zero or depends on those before it is
    replaced by the row of ``spare``, if that is given and independent, otherwise by zeros.
    """
    done = np.zeros(rows.shape, np.float64)
    for index in range(len(rows)):
        for candidates in (rows, spare):
            if candidates is not None and _normalize(candidates[index], done[:index], out=done[index]):
                break
    return done.astype(np.float32)


def expand(left: Values, right: Values, out: Values) -> None:
    """Write the sum over ``i`` of the outer products of ``left[i]`` and ``right[i]`` into ``out``.

    The result has the same bits everywhere.  One operation at a time in the cache: about 3 GB/s of ``out`` at rank 4.
    """
    scratch = np.empty(min(out.size, _PIECE), np.float32)
    for rows, columns in _tiles(out.shape):
        tile = out[rows, columns]
        term = scratch[: tile.size].reshape(tile.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(left[0, rows, np.newaxis], right[0, columns], out=tile)
            for index in range(1, len(left)):
                np.multiply(left[index, rows, np.newaxis], right[index, columns], out=term)
                tile += term


def subtract_product(left: Values, right: Values, values: Values, *, out: Values) -> None:
    """Write ``values - transpose(left) right`` into ``out``, which may be ``values``, with this machine's BLAS."""
    scratch = np.empty(min(out.size, _PIECE), np.float32)
    multiply = np.multiply if len(left) == 1 else np.matmul  # numpy does not pass an inner dimension of 1 to the BLAS
    for rows, columns in _tiles(values.shape):
        tile = values[rows, columns]
        product = scratch[: tile.size].reshape(tile.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            multiply(left[:, rows].T, right[:, columns], out=product)
            np.subtract(tile, product, out=out[rows, columns])


def _normalize(row: Values, others: NDArray[np.float64], *, out: NDArray[np.float64]) -> bool:
    """Write ``row`` without its components along ``others``, normalized, into ``out``; zeros and False if none left."""
    out[:] = row
    before = _norm(out)
    for _ in range(2):
        shares = (others * out).sum(axis=1)
        out -= (others * shares[:, np.newaxis]).sum(axis=0)
    after = _norm(out)
    if after <= _DEPENDENT * before:
        out.fill(0.0)
        return False
    out /= after
    return True


def _norm(vector: NDArray[np.float64]) -> float:
    return float(np.sqrt((vector * vector).sum()))


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of parts of a matrix that stay in the cache."""
    height, width = shape
    columns = min(width, _PIECE)
    step = _PIECE // columns
    for top in range(0, height, step):
        for start in range(0, width, columns):
            yield slice(top, top + step), slice(start, start + columns)
