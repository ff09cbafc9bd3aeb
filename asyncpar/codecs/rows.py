"""Encoded vectors as rows with a status word, and the sum of vectors by owners.

Encoded values cannot be summed in general.  So a vector is cut into a shard for each rank.  Each rank encodes each
shard for its owner; the owner decodes and adds them in float32 in the order of ranks, and encodes the sum; every rank,
the owner too, takes the decoded sum, so all ranks hold the same bits.

A row of non-finite values is marked in its status word, which every rank that reads it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Bytes, Codec, Values
from asyncpar.core.config.slicing import ceil_div
from asyncpar.errors import NonFiniteValue, ProtocolError

_STATUS_BYTES = 4
_FINITE, _NON_FINITE = 0, 1

MakeArray: TypeAlias = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""Returns an array of zeros of this shape and dtype."""


class RowFormat:
    """A row: a status word and ``count`` values encoded by ``codec``, padded to whole words of 4 bytes."""

    __slots__ = ("_body", "codec", "count", "nbytes")

    def __init__(self, codec: Codec, count: int) -> None:
        self.codec = codec
        self.count = count
        self._body = slice(_STATUS_BYTES, _STATUS_BYTES + codec.encoded_bytes(count))
        self.nbytes = 4 * ceil_div(self._body.stop, 4)

    def at(self, *place: int) -> RowFormat:
        """Return the format with the codec for ``place``: see ``Codec.at``."""
        codec = self.codec.at(*place)
        return self if codec is self.codec else RowFormat(codec, self.count)

    def encode(self, values: Values, row: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> bool:
        """Write ``values + residual`` into ``row``, and the error into ``lost``; return whether they are finite.

        If not, ``row`` is marked, and ``lost`` is undefined.
        """
        try:
            self.codec.encode(values, row[self._body], residual=residual, lost=lost)
        except NonFiniteValue:
            mark_non_finite(row)
            return False
        row[:_STATUS_BYTES] = _FINITE
        if self._body.stop < self.nbytes:
            row[self._body.stop :] = 0
        return True

    def decode(self, rows: Bytes, rank: int, out: Values, *, adds: bool, what: object) -> None:
        """Write the values of the row of ``rank`` to ``out``, or with ``adds`` add them.

        Raises ``ProtocolError`` naming ``what`` and ``rank`` for a row that cannot be decoded.
        """
        decode = self.codec.decode_add if adds else self.codec.decode
        try:
            decode(rows[rank, self._body], out)
        except ProtocolError as error:
            raise ProtocolError(f"{what}: what rank {rank} sent cannot be decoded: {error}") from error


def mark_non_finite(rows: Bytes) -> None:
    """Mark one row, or several, as non-finite."""
    rows[..., :_STATUS_BYTES] = 0
    rows[..., 0] = _NON_FINITE


def are_finite(rows: Bytes) -> bool:
    """Return whether no row is marked as non-finite."""
    return not rows[..., 0].any()


class ShardedSum:
    """The sum of vectors of ``count`` values, one of each of ``size`` ranks.

    On each rank: ``encode``, an all-to-all of ``outgoing`` into ``incoming``, ``sum_owned``, an all-gather of ``owned``
    into ``incoming``, ``decode``.  Vectors are padded to ``padded_count`` values.  ``shared`` makes the arrays that
    other ranks read.
    """

    def __init__(
        self,
        codec: Codec,
        count: int,
        *,
        rank: int,
        size: int,
        keeps_lost: bool = False,
        shared: MakeArray = np.zeros,
    ) -> None:
        self._rank, self._size, self._shard = rank, size, ceil_div(count, size)
        self.padded_count = self._shard * size
        self._format = self._drawn = RowFormat(codec, self._shard)
        self.outgoing: Bytes = shared((size, self._format.nbytes), np.uint8)
        self.incoming: Bytes = np.zeros((size, self._format.nbytes), np.uint8)
        self.owned: Bytes = shared((self._format.nbytes,), np.uint8)
        self._total: Values = np.zeros(self._shard, np.float32)
        self._lost_of_total: Values | None = np.zeros(self._shard, np.float32) if keeps_lost else None

    def draw(self, *place: int) -> None:
        """Make the codec draw at ``place`` in the next sum: see ``Codec.at``."""
        self._drawn = self._format.at(*place)

    def encode(self, values: Values, *, residual: Values | None = None, lost: Values | None = None) -> bool:
        """Encode all shards of ``values`` and ``residual``; return whether they are finite, otherwise no row is."""
        for rank in range(self._size):
            shard = self._of(rank)
            is_finite = self._drawn.encode(
                values[shard], self.outgoing[rank], residual=part(residual, shard), lost=part(lost, shard)
            )
            if not is_finite:
                mark_non_finite(self.outgoing)
                return False
        return True

    def sum_owned(self, *, what: object, lost: Values | None = None, is_mean: bool = False) -> bool:
        """Add the incoming rows in the order of ranks and encode the sum, or the mean; return whether it is finite.

        The encoding error is added to this rank's shard of ``lost``.
        """
        if not are_finite(self.incoming):
            mark_non_finite(self.owned)
            return False
        for rank in range(self._size):
            self._drawn.decode(self.incoming, rank, self._total, adds=rank > 0, what=what)
        if is_mean:
            self._total /= np.float32(self._size)
        if not self._drawn.encode(self._total, self.owned, lost=self._lost_of_total):
            return False  # the sum of finite values overflowed
        if lost is not None and self._lost_of_total is not None:
            lost[self._of(self._rank)] += self._lost_of_total
        return True

    def decode(self, out: Values, *, what: object) -> bool:
        """Write the sums of all owners to ``out``; return whether all are finite, otherwise ``out`` is unchanged."""
        if not are_finite(self.incoming):
            return False
        for rank in range(self._size):
            self._drawn.decode(self.incoming, rank, out[self._of(rank)], adds=False, what=what)
        return True

    @property
    def gain(self) -> float:
        """The factor that compensates for unsent values of a shard: see ``Codec.gain``."""
        return self._format.codec.gain(self._shard)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All arrays held."""
        held = (self.outgoing, self.incoming, self.owned, self._total)
        return held if self._lost_of_total is None else (*held, self._lost_of_total)

    def _of(self, rank: int) -> slice:
        """Return the shard that ``rank`` owns."""
        return slice(rank * self._shard, (rank + 1) * self._shard)


def part(array: Values | None, place: slice) -> Values | None:
    """Return ``array[place]``; None of None."""
    return None if array is None else array[place]
