"""Elements of tensors in the order in which they travel: rows along any dimension.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from asyncpar.collectives.reduction import Array


def rows_along(tensor: Array, dim: int) -> Array:
    """Return the tensor with dimension ``dim`` first, C-contiguous: itself where it is so already."""
    return np.ascontiguousarray(np.moveaxis(tensor, dim, 0))


def tensor_of_rows(rows: Array, dim: int) -> Array:
    """Undo ``rows_along``: return what its result was made of, C-contiguous."""
    return np.ascontiguousarray(np.moveaxis(rows, 0, dim))


def pack_pieces(tensor: Array, dim: int, bounds: Sequence[tuple[int, int]]) -> Array:
    """Return the elements of the parts of ``tensor`` along ``dim``, part after part, each in C order."""
    before = (slice(None),) * dim
    return np.concatenate([tensor[(*before, slice(start, stop))].ravel() for start, stop in bounds])


def join_pieces(elements: Array, dim: int, shapes: Sequence[tuple[int, ...]]) -> Array:
    """Return tensors of ``shapes``, whose elements come one after another, joined along ``dim``; C-contiguous."""
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    ends = list(accumulate(sizes))
    pieces = [elements[end - size : end].reshape(shape) for size, end, shape in zip(sizes, ends, shapes, strict=True)]
    return np.ascontiguousarray(np.concatenate(pieces, axis=dim))
