"""The sum of encoded vectors by owners, like ``codecs.rows`` on the host, in vectors on a device.

The rows are those of the host, bit by bit.  Nothing waits for the device; decisions that the host makes by values are
made by flags on the device: rows of non-finite values are marked in their status words, and then the result is
undefined and the flag of ``decode`` is false on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from asyncpar.codecs.rows import RowFormat
from asyncpar.core.config.slicing import ceil_div
from asyncpar.device.codecs.codec import DeviceCodec, Vector

MakeVector: TypeAlias = Callable[[int, type[np.generic]], Vector]
"""Returns a vector of so many zeros of a dtype."""

_STATUS_BYTES = 4


class DeviceRows:
    """Encoded rows of ``count`` values, one of each of ``size`` ranks, in ``rows``; ``is_valid`` has a byte per rank.

    A byte of ``is_valid`` is zero once data from that rank were out of range.
    """

    def __init__(self, codec: DeviceCodec[Vector], count: int, *, rows: Vector, is_valid: Vector) -> None:
        self._codec = codec
        self._rows, self._is_valid = rows, is_valid
        self._body = slice(_STATUS_BYTES, _STATUS_BYTES + codec.host.encoded_bytes(count))

    def encode(self, values: Vector, row: Vector, *, residual: Vector | None, lost: Vector | None) -> Vector:
        """Write ``values + residual`` into ``row``, and the error into ``lost``; return whether they are finite.

        The status word is that of finite values; ``mark`` marks the others.
        """
        return self._codec.encode(values, row[self._body], residual=residual, lost=lost)

    def decode(self, rank: int, out: Vector, *, adds: bool, is_finite: Vector) -> None:
        """Write the values of the row of ``rank`` to ``out``, or with ``adds`` add them, if all rows are finite."""
        self._is_valid[rank] *= self._codec.decode(self._rows[rank, self._body], out, adds=adds) | ~is_finite

    def are_finite(self) -> Vector:
        """Return whether no row is marked as non-finite."""
        return (self._rows[:, 0] == 0).all()


def mark(row: Vector, is_finite: Vector) -> None:
    """Mark one row, or several, by whether their values are finite."""
    row[..., 0] = ~is_finite


class DeviceShardedSum:
    """The sum of vectors of ``count`` values, one of each of ``size`` ranks; ``make`` gives the memory.

    On each rank: ``encode``, an all-to-all of ``outgoing`` into ``incoming``, ``sum_owned``, an all-gather of ``owned``
    into ``incoming``, ``decode``.  Vectors are padded to ``padded_count`` values.  Bytes of ``is_valid``, one per rank,
    show whether all data of the rank have been in range since ``encode``.
    """

    def __init__(
        self,
        codec: DeviceCodec[Vector],
        count: int,
        *,
        rank: int,
        size: int,
        make: MakeVector,
        is_valid: Vector,
        keeps_lost: bool = False,
    ) -> None:
        self._rank, self._size, self._shard = rank, size, ceil_div(count, size)
        self.padded_count = self._shard * size
        nbytes = RowFormat(codec.host, self._shard).nbytes
        self.outgoing = make(size * nbytes, np.uint8).reshape(size, nbytes)
        self.incoming = make(size * nbytes, np.uint8).reshape(size, nbytes)
        self.owned = make(nbytes, np.uint8)
        self.is_valid = is_valid
        self._total = make(self._shard, np.float32)
        self._lost_of_total = make(self._shard, np.float32) if keeps_lost else None
        self._rows = DeviceRows(codec, self._shard, rows=self.incoming, is_valid=self.is_valid)

    def encode(self, values: Vector, *, residual: Vector | None = None, lost: Vector | None = None) -> Vector:
        """Encode all shards of ``values`` and ``residual``; return whether they are finite, otherwise no row is."""
        self.is_valid[...] = 1
        is_finite = None
        for rank in range(self._size):
            shard = self._of(rank)
            one = self._rows.encode(
                values[shard],
                self.outgoing[rank],
                residual=None if residual is None else residual[shard],
                lost=None if lost is None else lost[shard],
            )
            is_finite = one if is_finite is None else is_finite & one
        mark(self.outgoing, is_finite)
        return is_finite

    def sum_owned(self, *, lost: Vector | None = None) -> Vector:
        """Add the incoming rows in the order of ranks and encode the sum; return whether it is finite.

        The encoding error is added to this rank's shard of ``lost``.
        """
        are_finite = self._rows.are_finite()
        for rank in range(self._size):
            self._rows.decode(rank, self._total, adds=rank > 0, is_finite=are_finite)
        is_finite = are_finite & self._rows.encode(self._total, self.owned, residual=None, lost=self._lost_of_total)
        mark(self.owned, is_finite)
        if lost is not None and self._lost_of_total is not None:
            lost[self._of(self._rank)] += self._lost_of_total
        return is_finite

    def decode(self, out: Vector) -> Vector:
        """Write the sums of all owners to ``out``; return whether all are finite, otherwise ``out`` is undefined."""
        is_finite = self._rows.are_finite()
        for rank in range(self._size):
            self._rows.decode(rank, out[self._of(rank)], adds=False, is_finite=is_finite)
        return is_finite

    def _of(self, rank: int) -> slice:
        """Return the shard that ``rank`` owns."""
        return slice(rank * self._shard, (rank + 1) * self._shard)
