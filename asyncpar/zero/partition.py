"""The values that each rank owns, and the buckets in which values are sent.  Pure.

Theory of operation.  The flat values of each parameter are cut into one ceil chunk per rank, in rank order: 8 values
over 4 ranks are [0, 1] to [6, 7], 7 over 3 are 3, 3 and 1; the last chunks may be empty.  A bucket is a matrix with a
row per rank: row r holds what rank r owns of some parameters, one after another, so that a reduce-scatter of the rows
brings every owner the sum of its values, and an all-gather brings its values to all ranks.  All rows have the same
length: where a chunk is shorter than the first one, the rest of its place is zeros, less than one value per rank and
parameter.  Parameters are taken in reverse order of registration, which is about the order in which gradients become
final.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.rows import RowFormat
from asyncpar.core.config.slicing import ceil_chunk, ceil_div
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.zero.config import MIB, ZeROConfig
from asyncpar.zero.errors import MemoryExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parameter as described to others; ``dtype`` is that of its storage."""

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
class RowSlot:
    """The place of a parameter in the rows of a bucket.

    From ``offset`` on, row r holds the values ``low`` to ``high`` of rank r's chunk, as far as there are any.
    """

    parameter: int
    low: int
    high: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBucket:
    """Rows of ``width`` values of one dtype."""

    index: int
    dtype: np.dtype[Any]
    width: int
    slots: tuple[RowSlot, ...]
    origin: int | None = None
    """The bucket from which this one was made by removing frozen parameters."""

    @property
    def parameters(self) -> tuple[int, ...]:
        """The parameters that have values in it."""
        return tuple(slot.parameter for slot in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The parameters in order of registration, cut over ``size`` ranks, and their buckets in order of sending."""

    size: int
    specs: tuple[Spec, ...]
    buckets: tuple[RowBucket, ...]

    def bounds(self, parameter: int, rank: int) -> tuple[int, int]:
        """Return start and stop of the part of the flat values that ``rank`` owns."""
        return ceil_chunk(self.specs[parameter].count, self.size, rank)

    def range_of(self, slot: RowSlot, rank: int) -> tuple[int, int]:
        """Return start and stop of the flat values that row ``rank`` holds in ``slot``."""
        start, stop = self.bounds(slot.parameter, rank)
        return min(start + slot.low, stop), min(start + slot.high, stop)

    def is_whole(self, bucket: RowBucket) -> bool:
        """Return whether the rows of ``bucket`` are just the flat values of one parameter, padded at the end."""
        return len(bucket.slots) == 1 and bucket.width == ceil_div(
            self.specs[bucket.slots[0].parameter].count, self.size
        )

    def buckets_of(self, parameter: int) -> tuple[int, ...]:
        """Return the indices of the buckets of a parameter: several if it was cut, none if it is empty."""
        return tuple(bucket.index for bucket in self.buckets if parameter in bucket.parameters)

    def bucket_nbytes(self, bucket: RowBucket) -> int:
        """Return the bytes of a bucket's rows."""
        return self.size * bucket.width * bucket.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(spec.count * spec.dtype.itemsize for spec in self.specs)

    @property
    def padding(self) -> int:
        """Padding bytes in all buckets."""
        return sum(self.bucket_nbytes(bucket) for bucket in self.buckets) - self.nbytes


def make_partition(
    specs: Sequence[Spec], size: int, *, bucket_bytes: int = 1 << 62, most_values: int = 1 << 62
) -> Partition:
    """Cut ``specs`` over ``size`` ranks.

    A bucket ends before it would exceed ``bucket_bytes``, unless it holds a single parameter; it never holds more than
    ``most_values`` values, or one per rank.
    """
    if size < 1:
        raise UsageError(f"size: expected 1 or more, got {size}")
    packer = _Packer(size, bucket_bytes, max(1, most_values // size))
    for parameter in reversed(range(len(specs))):
        packer.add(parameter, specs[parameter])
    return Partition(size=size, specs=tuple(specs), buckets=packer.finish())


def without_frozen(partition: Partition, frozen: Collection[int]) -> tuple[RowBucket, ...]:
    """Return the buckets without the places of ``frozen`` parameters, renumbered; those left empty are dropped.

    There is always at least one, since ranks communicate through it: where nothing is left, it has rows of one unowned
    value.
    """
    if not frozen or not partition.buckets:
        return partition.buckets
    kept: list[RowBucket] = []
    for bucket in partition.buckets:
        slots: list[RowSlot] = []
        for slot in bucket.slots:
            if slot.parameter not in frozen:
                slots.append(replace(slot, offset=_width(slots)))
        if slots:
            kept.append(replace(bucket, index=len(kept), width=_width(slots), slots=tuple(slots), origin=bucket.index))
    first = partition.buckets[0]
    return tuple(kept) or (replace(first, index=0, width=1, slots=(), origin=first.index),)


class _Packer:
    """Fills one bucket per dtype; finished buckets are in the order in which their last parameters were added."""

    def __init__(self, size: int, bucket_bytes: int, widest: int) -> None:
        self._size = size
        self._bucket_bytes = bucket_bytes
        self._widest = widest
        self._open: dict[np.dtype[Any], list[RowSlot]] = {}
        self._closed: list[tuple[np.dtype[Any], list[RowSlot]]] = []

    def add(self, parameter: int, spec: Spec) -> None:
        chunk = ceil_div(spec.count, self._size)
        for low, high in _pieces(chunk, self._widest):
            slots = self._open.get(spec.dtype, [])
            width = _width(slots)
            row_bytes = (width + high - low) * spec.dtype.itemsize
            if slots and (row_bytes * self._size > self._bucket_bytes or width + high - low > self._widest):
                self._closed.append((spec.dtype, slots))
                slots, width = [], 0
            slots.append(RowSlot(parameter=parameter, low=low, high=high, offset=width))
            self._open[spec.dtype] = slots

    def finish(self) -> tuple[RowBucket, ...]:
        """Return all buckets.  Later parameters have smaller numbers, so the least number in a bucket comes last."""
        groups = [*self._closed, *self._open.items()]
        groups.sort(key=lambda group: (-group[1][-1].parameter, group[1][-1].low))
        return tuple(
            RowBucket(index=index, dtype=dtype, width=_width(slots), slots=tuple(slots))
            for index, (dtype, slots) in enumerate(groups)
        )


def _width(slots: Sequence[RowSlot]) -> int:
    return slots[-1].offset + slots[-1].high - slots[-1].low if slots else 0


def _pieces(length: int, most: int) -> Iterator[tuple[int, int]]:
    for low in range(0, length, most):
        yield low, min(low + most, length)


Rows: TypeAlias = NDArray[Any]
"""A row per rank, as wide as the bucket."""


def pack_rows(partition: Partition, slot: RowSlot, flat: Array | None, rows: Rows) -> None:
    """Copy all ranks' parts of one parameter's ``flat`` values into ``rows``; zeros if there are none."""
    for rank in range(partition.size):
        start, stop = partition.range_of(slot, rank)
        place = _place(slot, rows[rank])
        if flat is not None:
            place[: stop - start] = flat[start:stop]
            place[stop - start :] = 0
        else:
            place.fill(0)


def unpack_rows(partition: Partition, slot: RowSlot, rows: Rows, flat: Array, *, ranks: Iterable[int]) -> None:
    """Copy the parts of ``ranks`` of one parameter out of ``rows`` into its ``flat`` values."""
    for rank in ranks:
        start, stop = partition.range_of(slot, rank)
        flat[start:stop] = _place(slot, rows[rank])[: stop - start]


def pack_own(slot: RowSlot, part: Array, row: Rows) -> None:
    """Copy this rank's part of a parameter, ``part``, into its row."""
    held = part[slot.low : slot.high]
    place = _place(slot, row)
    place[: held.size] = held
    place[held.size :] = 0


def own_in_row(slot: RowSlot, row: Rows, length: int) -> tuple[slice, Array]:
    """Return the slice of this rank's ``length`` values of a parameter that is in its row, and a view of them.

    The row may hold fewer than the slot has room for, or none.
    """
    part = slice(min(slot.low, length), min(slot.high, length))
    return part, _place(slot, row)[: part.stop - part.start]


def values_in_rows(slot: RowSlot, rows: Rows) -> Rows:
    """Return the values of one parameter in ``rows``, with its padding."""
    return rows[:, slot.offset : slot.offset + slot.high - slot.low]


def _place(slot: RowSlot, row: Rows) -> Array:
    place: Array = row[slot.offset : slot.offset + slot.high - slot.low]
    return place


ExtraBytes = Callable[[int, int, np.dtype[Any]], int]
"""Returns the bytes for summing so many rows of that width and dtype, besides the rows: ``RowSums.extra_bytes``."""

_MOST_BUCKETS = 4
"""Number of buckets in progress beyond which a step gets no faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Room for ``window`` buckets in progress, of ``buffers`` bytes, and ``rest`` bytes for gathered parameters."""

    window: int
    buffers: int
    rest: int


def make_budget(partition: Partition, config: ZeROConfig, extra_bytes: ExtraBytes) -> Budget:
    """Divide ``max_memory_usage_mb``.  Raises ``MemoryExceeded`` if not even one bucket fits."""
    if partition.size == 1 or not partition.buckets:
        return Budget(window=_MOST_BUCKETS, buffers=0, rest=config.most_bytes)
    widths = usual_widths(partition, config)
    needs = [_buffer_bytes(partition, bucket, extra_bytes) for bucket in partition.buckets]
    largest = max(needs)
    if largest > config.most_bytes:
        raise MemoryExceeded(
            f"max_memory_usage_mb: expected room for {largest / MIB:.3g} MiB, the largest bucket, got "
            f"{config.max_memory_usage_mb:g}; lower bucket_size_mb or reduce_bucket_size"
        )
    window = min(max(config.buffer_bytes_of(partition.nbytes) // largest, 1), _MOST_BUCKETS)
    if window == 1 and 2 * largest <= config.most_share:
        window = 2  # one is packed while the other is sent
    return Budget(
        window=window, buffers=_held_bytes(partition, widths, needs, window), rest=config.most_bytes - window * largest
    )


Widths = Mapping[np.dtype[Any], range]
"""Ranges of bucket widths, by dtype, that memory for the widest of them serves."""


def usual_widths(partition: Partition, config: ZeROConfig) -> Widths:
    """Return the widths of buckets within the intended size, and of others down to a quarter."""
    limit = config.bucket_bytes_of(partition.nbytes)
    widths: dict[np.dtype[Any], list[int]] = {}
    for bucket in partition.buckets:
        if partition.bucket_nbytes(bucket) <= limit:
            widths.setdefault(bucket.dtype, []).append(bucket.width)
    return {dtype: range(min(*found, max(found) // 4), max(found) + 1) for dtype, found in widths.items()}


def served_width(width: int, dtype: np.dtype[Any], widths: Widths) -> int:
    """Return the width of the memory that serves a bucket of ``width``."""
    usual = widths.get(dtype, range(0))
    return usual[-1] if width in usual else width


def gather_bytes(unit: Partition, widths: Widths) -> int:
    """Return the memory for a gather of ``unit``: its values, and its largest bucket, of usual ``widths``."""
    rows = (served_width(bucket.width, bucket.dtype, widths) * bucket.dtype.itemsize for bucket in unit.buckets)
    return unit.nbytes + ((unit.size + 1) * max(rows, default=0) if unit.size > 1 else 0)


def most_gathered(units: Sequence[int], depth: int, runs: int) -> int:
    """Return the most bytes gathered at once from ``units`` of so many bytes, ``depth`` ahead of the one in use.

    They are passed through, forward and backward, in ``runs``: where one ends and another begins, prefetched units wait
    for their turn, at either end.
    """
    return sum(sorted(units)[-(1 + depth * (2 * runs - 1)) :])


def encoded_bytes(rows: int, width: int, dtype: np.dtype[Any]) -> int:  # noqa: ARG001  # it is an ``ExtraBytes``
    """Return the memory of rows sent as 8-bit integers, both outgoing and incoming, and of their total."""
    return 2 * rows * RowFormat(Int8(), width).nbytes + 4 * width


def _buffer_bytes(partition: Partition, bucket: RowBucket, extra_bytes: ExtraBytes) -> int:
    """Return the memory of ``bucket`` in progress: its rows, the row of this rank, and the extra memory of sums."""
    rows = partition.bucket_nbytes(bucket)
    return rows + rows // partition.size + extra_bytes(partition.size, bucket.width, bucket.dtype)


def _held_bytes(partition: Partition, widths: Widths, needs: Sequence[int], window: int) -> int:
    """Return the bytes of buffers: for each dtype those of usual width, and those of the largest parameters."""
    usual: dict[np.dtype[Any], list[int]] = {}
    others: list[int] = []
    for bucket, need in zip(partition.buckets, needs, strict=True):
        if bucket.width in widths.get(bucket.dtype, ()):
            usual.setdefault(bucket.dtype, []).append(need)
        else:
            others.append(need)
    held = sum(min(window, len(found)) * max(found) for found in usual.values())
    return held + sum(sorted(others)[-window:])
