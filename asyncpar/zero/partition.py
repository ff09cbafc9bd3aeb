"""Who owns which values, and how values travel in buckets.  Pure.

Theory of operation.  The flat values of each parameter are cut into one ceil chunk per rank, in rank order: 8 values
over 4 ranks are [0, 1] to [6, 7], 7 over 3 are 3, 3 and 1; the last chunks may be empty.  A bucket is a matrix with a
row per rank: row r holds what rank r owns of some parameters, one after another, so that a reduce-scatter of the rows
brings every owner the sum of its values, and an all-gather brings its values to everyone.  All rows are equally long:
where a chunk is shorter than the first one, the rest of its place is zeros, less than one value per rank and parameter.
Parameters are taken in reverse order of registration, which is about the order in which gradients become final.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.errors import UsageError


def ceil_chunks(count: int, parts: int) -> list[tuple[int, int]]:
    """Return start and stop of each rank's chunk of ``count`` values."""
    if parts < 1:
        raise UsageError(f"parts: expected 1 or more, got {parts}")
    return [ceil_chunk(count, parts, part) for part in range(parts)]


def ceil_chunk(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return start and stop of one of ``parts`` ceil chunks of ``count`` values."""
    step = -(-count // parts)
    return min(part * step, count), min((part + 1) * step, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parameter as others must know it; ``dtype`` is the one it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a parameter in the rows of a bucket.

    From ``offset`` on, row r holds the values ``low`` to ``high`` of rank r's chunk, as far as there are any.
    """

    parameter: int
    low: int
    high: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows of ``width`` values of one dtype."""

    index: int
    dtype: np.dtype[Any]
    width: int
    slots: tuple[Slot, ...]

    @property
    def parameters(self) -> tuple[int, ...]:
        """The parameters that have values in it."""
        return tuple(slot.parameter for slot in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The parameters in order of registration, cut over ``size`` ranks, and their buckets in the order they go."""

    size: int
    specs: tuple[Spec, ...]
    buckets: tuple[Bucket, ...]

    def bounds(self, parameter: int, rank: int) -> tuple[int, int]:
        """Return start and stop of what ``rank`` owns of the flat values."""
        return ceil_chunk(self.specs[parameter].count, self.size, rank)

    def range_of(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Return start and stop of the flat values that row ``rank`` holds in ``slot``."""
        start, stop = self.bounds(slot.parameter, rank)
        return min(start + slot.low, stop), min(start + slot.high, stop)

    def buckets_of(self, parameter: int) -> tuple[int, ...]:
        """Return the indices of the buckets that a parameter is in: several if it was cut, none if it is empty."""
        return tuple(bucket.index for bucket in self.buckets if parameter in bucket.parameters)

    def bucket_nbytes(self, bucket: Bucket) -> int:
        """Return the bytes of a bucket's rows."""
        return self.size * bucket.width * bucket.dtype.itemsize

    @property
    def padding(self) -> int:
        """Bytes of all buckets that are no values."""
        values = sum(spec.count * spec.dtype.itemsize for spec in self.specs)
        return sum(self.bucket_nbytes(bucket) for bucket in self.buckets) - values


def make_partition(
    specs: Sequence[Spec], size: int, *, bucket_bytes: int = 1 << 62, most_values: int = 1 << 62
) -> Partition:
    """Cut ``specs`` over ``size`` ranks.

    A bucket ends before it would be larger than ``bucket_bytes``, unless it holds a single parameter; it never holds
    more than ``most_values`` values, or one per rank.
    """
    if size < 1:
        raise UsageError(f"size: expected 1 or more, got {size}")
    packer = _Packer(size, bucket_bytes, max(1, most_values // size))
    for parameter in reversed(range(len(specs))):
        packer.add(parameter, specs[parameter])
    return Partition(size=size, specs=tuple(specs), buckets=packer.finish())


class _Packer:
    """Fills one bucket per dtype at a time; buckets are in the order in which their last parameters came."""

    def __init__(self, size: int, bucket_bytes: int, widest: int) -> None:
        self._size = size
        self._bucket_bytes = bucket_bytes
        self._widest = widest
        self._open: dict[np.dtype[Any], list[Slot]] = {}
        self._closed: list[tuple[np.dtype[Any], list[Slot]]] = []

    def add(self, parameter: int, spec: Spec) -> None:
        chunk = -(-spec.count // self._size)
        for low, high in _pieces(chunk, self._widest):
            slots = self._open.get(spec.dtype, [])
            width = _width(slots)
            row_bytes = (width + high - low) * spec.dtype.itemsize
            if slots and (row_bytes * self._size > self._bucket_bytes or width + high - low > self._widest):
                self._closed.append((spec.dtype, slots))
                slots, width = [], 0
            slots.append(Slot(parameter=parameter, low=low, high=high, offset=width))
            self._open[spec.dtype] = slots

    def finish(self) -> tuple[Bucket, ...]:
        """Return all buckets.  Later parameters have smaller numbers, so the least number in a bucket comes last."""
        groups = [*self._closed, *self._open.items()]
        groups.sort(key=lambda group: (-group[1][-1].parameter, group[1][-1].low))
        return tuple(
            Bucket(index=index, dtype=dtype, width=_width(slots), slots=tuple(slots))
            for index, (dtype, slots) in enumerate(groups)
        )


def _width(slots: Sequence[Slot]) -> int:
    return slots[-1].offset + slots[-1].high - slots[-1].low if slots else 0


def _pieces(length: int, most: int) -> Iterator[tuple[int, int]]:
    for low in range(0, length, most):
        yield low, min(low + most, length)
