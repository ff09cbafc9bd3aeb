"""Values at positions that all ranks draw alike, so positions need not be sent and encoded forms can be summed.

Layout of ``n`` values of which ``k = ceil(ratio n)`` are kept: ``k`` values as encoded by their codec, and nothing
else.  Value ``i`` is that at position ``(shift + p_i) mod n``: ``p_i`` is drawn from
``floor(i n / k) .. floor((i + 1) n / k) - 1``, ``shift`` is the key of the key, modulo ``n``, and the key is made of
the seed and the place, all as in ``draw.py``.  So all positions are equally likely, and evenly spread.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Bytes, Codec, Values, check_decode, check_encode
from asyncpar.codecs.corrected import Corrected
from asyncpar.codecs.draw import check_seed, draw_positions, make_key
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.share import KeptShare
from asyncpar.errors import NonFiniteValue


class RandomK(Codec):
    """Sends a random fraction ``ratio`` of the values, different in each place; summable if the codec of the values is.

    Values are sent unchanged, not divided by ``ratio``: that would make single steps unbiased, but is no contraction,
    and with error feedback nothing stays unsent anyway (Stich et al. 2018).  Without error feedback, the decoder
    multiplies by the ``gain``, so that the result is the gradient in the mean over places.  Used without ``at``, it
    never sends the other positions.

    ``seed`` determines which values are drawn; it is equal on all ranks.
    """

    def __init__(self, ratio: float, seed: int = 0, values: Codec | None = None) -> None:
        self.values = Identity() if values is None else values
        self.sum_dtype = self.values.sum_dtype
        self._share = KeptShare(ratio)
        self._seed = check_seed(seed)
        self._place: tuple[int, ...] = ()
        self.name = f"randomk:{self._share.text}" + (f":{seed}" if seed else "")
        if self.values != Identity():
            self.name += f"+{self.values.name}"

    @property
    def can_be_followed(self) -> bool:
        return self.values == Identity()

    def followed_by(self, values: Codec) -> Self:
        """Return the codec with its values encoded by ``values``."""
        followed = type(self)(float(self._share.text), self._seed, values)
        followed._place = self._place
        return followed

    def at(self, *place: int) -> Self:
        moved = self.followed_by(self.values.at(*place, 0))  # otherwise a random-k of a random-k would draw the same
        moved._place = place
        return moved

    def encoded_bytes(self, count: int) -> int:
        return self.values.encoded_bytes(self._share.of(count))

    def contraction(self, count: int) -> float:
        kept = self._share.of(count)
        return kept / max(count, 1) * self.values.contraction(kept) if count else 1.0

    def gain(self, count: int) -> float:
        kept = self._share.of(count)
        return count / kept * self.values.gain(kept) if kept else 1.0

    def error_bound(self, values: Values) -> float:
        chosen = values[self._positions(values.size)]
        return max(float(np.abs(values).max(initial=0.0)), self.values.error_bound(chosen))

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        source = Corrected(values, residual, lost)
        for x in source.pieces():
            if not np.isfinite(x).all():
                raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
        positions = self._positions(values.size)
        chosen = source.take(positions)
        missed = None if lost is None else np.empty_like(chosen)
        self.values.encode(chosen, out, lost=missed)
        if lost is not None and missed is not None:
            lost[positions] = missed

    def decode(self, encoded: Bytes, out: Values) -> None:
        positions, chosen = self._read(encoded, out)
        out.fill(0.0)
        out[positions] = chosen

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        positions, chosen = self._read(encoded, out)
        with np.errstate(over="ignore", invalid="ignore"):
            out[positions] += chosen

    def _read(self, encoded: Bytes, out: Values) -> tuple[NDArray[np.int64], Values]:
        """Return the positions in ``out`` and the values, after checking them."""
        check_decode(self, encoded, out)
        chosen = np.empty(self._share.of(out.size), np.float32)
        self.values.decode(encoded, chosen)
        return self._positions(out.size), chosen

    def _positions(self, count: int) -> NDArray[np.int64]:
        """Return the positions of the values that are sent, in the order of sending."""
        key = make_key(self._seed, *self._place)
        positions = draw_positions(self._share.of(count), count, key)
        positions += make_key(key) % max(count, 1)
        np.subtract(positions, count, out=positions, where=positions >= count)
        return positions
