"""The part of a tensor on each rank, in ceil chunks.  Pure.

There are two ways to divide a dimension, and both are needed.  ``shards.plan.split_bounds`` gives parts that differ by
at most one, larger ones first.  No rank is without work, so layers are cut like this.  Here a part has
``ceil(length / parts)`` places and only the last ones are shorter, or empty: the place of an element follows from its
index by one division, every rank can keep a buffer of the same size, and these are the parts of
``Communicator.reduce_scatter``; so whole tensors are scattered and gathered like this.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import SupportsIndex

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.core.config.slicing import TensorSlice, ceil_chunks
from asyncpar.errors import UsageError


def rows_along(tensor: Array, dim: int) -> Array:
    """Return the tensor with dimension ``dim`` first, C-contiguous: itself if it already is."""
    return np.ascontiguousarray(np.moveaxis(tensor, dim, 0))


def tensor_of_rows(rows: Array, dim: int) -> Array:
    """Undo ``rows_along``: return its original tensor, C-contiguous."""
    return np.ascontiguousarray(np.moveaxis(rows, 0, dim))


def pack_pieces(tensor: Array, dim: int, bounds: Sequence[tuple[int, int]]) -> Array:
    """Return the elements of the parts of ``tensor`` along ``dim``, part after part, each in C order."""
    before = (slice(None),) * dim
    return np.concatenate([tensor[(*before, slice(start, stop))].ravel() for start, stop in bounds])


def join_pieces(elements: Array, dim: int, shapes: Sequence[tuple[int, ...]]) -> Array:
    """Return tensors of ``shapes``, given by their concatenated elements, joined along ``dim``; C-contiguous."""
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    ends = list(accumulate(sizes))
    pieces = [elements[end - size : end].reshape(shape) for size, end, shape in zip(sizes, ends, shapes, strict=True)]
    return np.ascontiguousarray(np.concatenate(pieces, axis=dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPartition:
    """The part ``start_idx`` to ``end_idx`` along dimension ``split_dim``, of ``num_partitions`` parts.

    ``partition_rank`` is the number of the part.  An empty part may begin at the end of the dimension, never past it.
    One partition is the whole tensor: it is not split, whichever rank holds it.
    """

    split_dim: int
    start_idx: int
    end_idx: int
    num_partitions: int
    partition_rank: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, check_number(getattr(self, name), name))
        if self.num_partitions < 1:
            raise UsageError(f"num_partitions: expected at least 1, got {self.num_partitions}")
        if not 0 <= self.partition_rank < self.num_partitions:
            raise UsageError(f"partition_rank: expected 0..{self.num_partitions - 1}, got {self.partition_rank}")
        if self.split_dim < 0:
            raise UsageError(f"split_dim: expected 0 or more, got {self.split_dim}")
        if not 0 <= self.start_idx <= self.end_idx:
            raise UsageError(
                f"start_idx, end_idx: expected a range from 0 or more, got {self.start_idx}..{self.end_idx}"
            )

    @classmethod
    def of(cls, shape: Sequence[int], split_dim: int, num_partitions: int, partition_rank: int) -> TensorPartition:
        """Return part ``partition_rank`` of a tensor of ``shape`` divided along ``split_dim``."""
        dim = check_split_dim(split_dim, len(shape))
        if check_number(num_partitions, "num_partitions") < 1:
            raise UsageError(f"num_partitions: expected at least 1, got {num_partitions}")
        if not 0 <= check_number(partition_rank, "partition_rank") < num_partitions:
            raise UsageError(f"partition_rank: expected 0..{num_partitions - 1}, got {partition_rank}")
        start, end = ceil_chunks(shape[dim], num_partitions)[partition_rank]
        return cls(
            split_dim=dim,
            start_idx=start,
            end_idx=end,
            num_partitions=num_partitions,
            partition_rank=partition_rank,
        )

    @property
    def length(self) -> int:
        """Number of places along the split dimension."""
        return self.end_idx - self.start_idx

    @property
    def is_empty(self) -> bool:
        return self.start_idx == self.end_idx

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is not split at all."""
        return self.num_partitions == 1

    def slice_of(self, shape: tuple[int, ...]) -> TensorSlice:
        """Return the part of a tensor of ``shape``.  Raises ``UsageError`` if it has no such part."""
        dim = check_split_dim(self.split_dim, len(shape))
        if self.end_idx > shape[dim]:
            raise UsageError(
                f"end_idx: expected at most {shape[dim]}, the length of dimension {dim}, got {self.end_idx}"
            )
        if self.is_whole and self.length != shape[dim]:
            raise UsageError(
                f"start_idx, end_idx: expected 0..{shape[dim]} of the only partition, got {self.start_idx}.."
                f"{self.end_idx}"
            )
        return TensorSlice.along(shape, dim, self.start_idx, self.end_idx)


def check_number(value: object, name: str) -> int:
    """Return ``value`` if it is an integer, including numpy's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(f"{name}: expected an integer, got {value!r}")
    return operator.index(value)


def check_split_dim(split_dim: object, ndim: int) -> int:
    """Return ``split_dim`` if a tensor of ``ndim`` dimensions has it.  Negative ones are not accepted."""
    dim = check_number(split_dim, "split_dim")
    if not 0 <= dim < ndim:
        raise UsageError(f"Split dimension {dim} out of bounds for tensor with {ndim} dimension{'s' * (ndim != 1)}")
    return dim


def check_shape(shape: object, name: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple if it is the shape of an array."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise UsageError(f"{name}: expected a sequence of lengths, got {shape!r}")
    lengths = tuple(check_number(length, name) for length in shape)
    if any(length < 0 for length in lengths):
        raise UsageError(f"{name}: expected lengths of 0 or more, got {lengths}")
    return lengths
