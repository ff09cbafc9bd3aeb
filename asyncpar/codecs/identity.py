"""The codec that changes nothing."""

from __future__ import annotations

import numpy as np

from asyncpar.codecs.codec import (
    PIECE,
    Bytes,
    Codec,
    Values,
    check_decode,
    check_encode,
    corrected,
    is_finite,
    plan_pieces,
)
from asyncpar.errors import NonFiniteValue, ProtocolError


class Identity(Codec):
    """Unchanged little-endian float32.  Exact, and summable."""

    name = "none"
    sum_dtype = np.dtype("<f4")

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def error_bound(self, values: Values) -> float:  # noqa: ARG002
        return 0.0

    def contraction(self, count: int) -> float:  # noqa: ARG002
        return 1.0

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        written = out.view("<f4")
        for piece in plan_pieces(values.size, PIECE):
            if not is_finite(corrected(values, residual, written, piece.values, written)):
                raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
        if lost is not None:
            lost.fill(0.0)

    def decode(self, encoded: Bytes, out: Values) -> None:
        out[:] = self._check(encoded, out)

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        with np.errstate(over="ignore"):
            out += self._check(encoded, out)

    def _check(self, encoded: Bytes, out: Values) -> Values:
        """Return the values of ``encoded``, which fit ``out`` and are finite."""
        check_decode(self, encoded, out)
        values = encoded.view("<f4")
        if not all(is_finite(values[piece.values]) for piece in plan_pieces(out.size, PIECE)):
            raise ProtocolError(f"{self.name}: expected finite numbers, got NaN or infinity")
        return values
