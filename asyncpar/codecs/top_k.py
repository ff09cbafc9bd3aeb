"""Send the largest values and their positions.

Layout of ``n`` values of which ``k = ceil(ratio n)`` are kept, ``b = ceil(n / 65536)`` blocks::

    offset 0                  b little-endian uint32: how many entries lie in each block; together m <= k
    offset 4 b                k little-endian uint16: the first m are offsets within their blocks, ascending; then zeros
    offset 4 b + 2 k          2 bytes of zeros if k is odd
    offset 4 b + 2 (k + k%2)  k values as their codec encodes them; the last k - m are zeros, whatever they decode to

Exactly the ``k`` values of largest magnitude are sent, the first among equals, and never a zero: ``m < k`` only if
fewer differ from zero.  If that would not be shorter than all values in the codec of the values, those are sent alone.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Bytes, Codec, Values, check_decode, check_encode
from asyncpar.codecs.corrected import BLOCK, Corrected
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.selection import Entries, find_positions, select_largest
from asyncpar.codecs.share import KeptShare
from asyncpar.errors import ProtocolError


class TopK(Codec):
    """Sends the fraction ``ratio`` of values of largest magnitude.  Not summable.

    Meant for error feedback: small values are sent once their sum has grown (Stich et al. 2018).
    """

    def __init__(self, ratio: float, values: Codec | None = None) -> None:
        self.values = Identity() if values is None else values
        self._share = KeptShare(ratio)
        self.name = f"topk:{self._share.text}"
        if self.values != Identity():
            self.name += f"+{self.values.name}"

    @property
    def can_be_followed(self) -> bool:
        return self.values == Identity()

    def followed_by(self, values: Codec) -> Self:
        """Return the codec with its values encoded by ``values``."""
        return type(self)(float(self._share.text), values)

    def at(self, *place: int) -> Self:
        values = self.values.at(*place, 0)
        return self if values is self.values else self.followed_by(values)

    def encoded_bytes(self, count: int) -> int:
        return min(self._sparse_bytes(count), self.values.encoded_bytes(count))

    def kept(self, count: int) -> int:
        """Return the largest number of ``count`` values that are sent."""
        return self._share.of(count)

    def index_bytes(self, count: int) -> int:
        """Return the number of bytes before the values, if not all are sent."""
        return _index_bytes(count, self._share.of(count))

    def contraction(self, count: int) -> float:
        if self.is_dense(count):
            return self.values.contraction(count)
        kept = self._share.of(count)
        return kept / count * self.values.contraction(kept)

    def gain(self, count: int) -> float:
        return self.values.gain(count if self.is_dense(count) else self._share.of(count))

    def error_bound(self, values: Values) -> float:
        if self.is_dense(values.size):
            return self.values.error_bound(values)
        entries = select_largest(Corrected(values, None, None), self._share.of(values.size))
        rest = values.copy()
        rest[entries.positions] = 0.0
        return max(float(np.abs(rest).max()), self.values.error_bound(self._pad(entries, values.size)))

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        if self.is_dense(values.size):
            self.values.encode(values, out, residual=residual, lost=lost)
            return
        entries = select_largest(Corrected(values, residual, lost), self._share.of(values.size))
        counts, offsets, encoded = self._split(out, values.size)
        out[: out.size - encoded.size] = 0
        counts[:] = entries.counts
        offsets[: entries.offsets.size] = entries.offsets
        chosen = self._pad(entries, values.size)
        missed = None if lost is None else np.empty_like(chosen)
        self.values.encode(chosen, encoded, lost=missed)
        if lost is not None and missed is not None:
            lost[entries.positions] = missed[: entries.values.size]

    def decode(self, encoded: Bytes, out: Values) -> None:
        check_decode(self, encoded, out)
        if self.is_dense(out.size):
            self.values.decode(encoded, out)
            return
        positions, chosen = self._read(encoded, out.size)
        out.fill(0.0)
        out[positions] = chosen

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        check_decode(self, encoded, out)
        if self.is_dense(out.size):
            self.values.decode_add(encoded, out)
            return
        positions, chosen = self._read(encoded, out.size)
        with np.errstate(over="ignore", invalid="ignore"):
            out[positions] += chosen

    def _read(self, encoded: Bytes, count: int) -> tuple[NDArray[np.int64], Values]:
        """Return the positions and values of all entries, after checking them."""
        counts, offsets, packed = self._split(encoded, count)
        kept, total = offsets.size, int(counts.sum(dtype=np.uint64))
        if total > kept:
            raise ProtocolError(f"{self.name}: expected at most {kept} entries, got {total}")
        positions = find_positions(counts.astype(np.int64), offsets[:total])
        if (positions[1:] <= positions[:-1]).any() or (total and positions[-1] >= count):
            raise ProtocolError(f"{self.name}: expected ascending positions below {count}, got others")
        chosen = np.empty(kept, np.float32)
        self.values.decode(packed, chosen)
        return positions, chosen[:total]

    def _pad(self, entries: Entries, count: int) -> Values:
        """Return the values of ``entries``, and zeros up to the number that is sent for ``count`` values."""
        padded = np.zeros(self._share.of(count), np.float32)
        padded[: entries.values.size] = entries.values
        return padded

    def is_dense(self, count: int) -> bool:
        """Return whether all of ``count`` values are sent, in the codec of the values, because that is not longer."""
        return self._sparse_bytes(count) >= self.values.encoded_bytes(count)

    def _sparse_bytes(self, count: int) -> int:
        kept = self._share.of(count)
        return _index_bytes(count, kept) + self.values.encoded_bytes(kept)

    def _split(self, encoded: Bytes, count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16], Bytes]:
        """Return views of the counts, the offsets and the encoded values."""
        kept, counts = self._share.of(count), 4 * _count_blocks(count)
        start = _index_bytes(count, kept)
        return encoded[:counts].view("<u4"), encoded[counts : counts + 2 * kept].view("<u2"), encoded[start:]


def _count_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _index_bytes(count: int, kept: int) -> int:
    """Return the number of bytes before the values."""
    return 4 * _count_blocks(count) + 2 * (kept + kept % 2)
