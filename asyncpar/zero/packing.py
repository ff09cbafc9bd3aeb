"""Values between parameters and the rows of buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from numpy.typing import NDArray

from asyncpar.nn.parameter import Array
from asyncpar.zero.partition import Partition, Slot

Rows: TypeAlias = NDArray[Any]
"""A row per rank, as wide as the bucket."""


def pack_rows(partition: Partition, slot: Slot, flat: Array | None, rows: Rows) -> None:
    """Copy what all ranks own of one parameter's ``flat`` values into ``rows``; zeros where there are none."""
    for rank in range(partition.size):
        start, stop = partition.range_of(slot, rank)
        place = _place(slot, rows[rank])
        if flat is not None:
            place[: stop - start] = flat[start:stop]
            place[stop - start :] = 0
        else:
            place.fill(0)


def unpack_rows(partition: Partition, slot: Slot, rows: Rows, flat: Array, *, ranks: Iterable[int]) -> None:
    """Copy what ``ranks`` own of one parameter out of ``rows`` into its ``flat`` values."""
    for rank in ranks:
        start, stop = partition.range_of(slot, rank)
        flat[start:stop] = _place(slot, rows[rank])[: stop - start]


def pack_own(slot: Slot, part: Array, row: Rows) -> None:
    """Copy what this rank owns of a parameter, ``part``, into its row."""
    held = part[slot.low : slot.high]
    place = _place(slot, row)
    place[: held.size] = held
    place[held.size :] = 0


def own_in_row(slot: Slot, row: Rows, length: int) -> tuple[slice, Array]:
    """Return which part of the ``length`` values that this rank owns of a parameter are in its row, and a view of them.

    The row may hold fewer than the slot has room for, or none.
    """
    part = slice(min(slot.low, length), min(slot.high, length))
    return part, _place(slot, row)[: part.stop - part.start]


def values_in_rows(slot: Slot, rows: Rows) -> Rows:
    """Return all that ``rows`` hold of one parameter, with its padding."""
    return rows[:, slot.offset : slot.offset + slot.high - slot.low]


def _place(slot: Slot, row: Rows) -> Array:
    place: Array = row[slot.offset : slot.offset + slot.high - slot.low]
    return place
