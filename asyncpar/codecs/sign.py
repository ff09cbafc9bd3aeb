"""One bit per value, its sign, and one scale per block (Seide et al. 2014; Karimireddy et al. 2019).

Layout of ``n`` encoded values, ``b = ceil(n / 1024)`` blocks, no padding::

    offset 0      b little-endian float32 scales
    offset 4 b    ceil(n / 8) bytes: bit i % 8, counted from the lowest, of byte i // 8 is set where value i is
                  negative; the bits after the last value are 0

Value ``i`` decodes to ``scale[i // 1024]`` or minus that.  The scale of a block is its mean magnitude, which minimizes
the squared error.  Only a block of zeros decodes to zeros: other zeros become plus or minus the scale, which is why the
codec is useful only with error feedback.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import (
    BlockRange,
    Bytes,
    Codec,
    Values,
    check_decode,
    check_encode,
    corrected,
    count_blocks,
    plan_pieces,
    row_buffers,
    scratch,
)
from asyncpar.errors import NonFiniteValue, ProtocolError

BLOCK = 1024
"""Values that share a scale."""

_SIGN = np.uint32(0x80000000)


class Sign(Codec):
    """One bit per value and one scale per 1,024: 31 times smaller than float32.  Not summable."""

    name = "sign"

    def encoded_bytes(self, count: int) -> int:
        return 4 * count_blocks(count, BLOCK) + count_blocks(count, 8)

    def error_bound(self, values: Values) -> float:
        return float(np.abs(values).max(initial=0.0)) * (1.0 + 2.0**-12)

    def contraction(self, count: int) -> float:
        """Return the contraction of the worst case: one value of a block is not zero."""
        return (1.0 - 2.0**-12) / max(min(count, BLOCK), 1)

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        scales, signs = _split(out, values.size)
        room, spare = scratch(values.size), scratch(values.size)
        negative = np.empty(spare.size, np.bool_)
        with row_buffers(BLOCK):
            for piece in plan_pieces(values.size, BLOCK):
                x = corrected(values, residual, lost, piece.values, room).reshape(piece.shape)
                part = spare[: piece.size].reshape(piece.shape)
                scale = scales[piece.blocks] = _mean_magnitudes(x, part)
                np.signbit(x.reshape(-1), out=negative[: piece.size])
                signs[_bytes_of(piece)] = np.packbits(negative[: piece.size], bitorder="little")
                if lost is not None:
                    np.bitwise_and(x.view(np.uint32), _SIGN, out=part.view(np.uint32))
                    _put_scales(part, scale)
                    x -= part

    def decode(self, encoded: Bytes, out: Values) -> None:
        scales, signs = self._check(encoded, out)
        with row_buffers(BLOCK):
            for piece in plan_pieces(out.size, BLOCK):
                _decode_piece(scales[piece.blocks], signs[_bytes_of(piece)], out[piece.values].reshape(piece.shape))

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        scales, signs = self._check(encoded, out)
        room = scratch(out.size)
        with row_buffers(BLOCK), np.errstate(over="ignore"):
            for piece in plan_pieces(out.size, BLOCK):
                decoded = room[: piece.size]
                _decode_piece(scales[piece.blocks], signs[_bytes_of(piece)], decoded.reshape(piece.shape))
                out[piece.values] += decoded

    def _check(self, encoded: Bytes, out: Values) -> tuple[NDArray[np.float32], Bytes]:
        """Return the scales and signs of ``encoded``, which fit ``out`` and are in range."""
        check_decode(self, encoded, out)
        scales, signs = _split(encoded, out.size)
        if not (np.isfinite(scales) & ~np.signbit(scales)).all():
            raise ProtocolError(f"{self.name}: expected finite scales that are not negative, got others")
        if out.size % 8 and signs[-1] >> out.size % 8:
            raise ProtocolError(f"{self.name}: expected zeros after the last of {out.size} values, got others")
        return scales, signs


def _mean_magnitudes(x: Values, magnitudes: Values) -> NDArray[np.float32]:
    """Return the mean magnitude of each row of ``x``, and leave all of them in ``magnitudes``."""
    np.abs(x, out=magnitudes)
    with np.errstate(over="ignore"):
        mean: NDArray[np.float32] = np.add.reduce(magnitudes, axis=1)
    mean /= np.float32(x.shape[1])
    if not np.isfinite(mean).all():  # or the sum overflowed
        mean = magnitudes.mean(axis=1, dtype=np.float64).astype(np.float32)
        if not np.isfinite(mean).all():
            raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
    return mean


def _decode_piece(scales: NDArray[np.float32], signs: Bytes, out: Values) -> None:
    """Write the values of ``signs`` into the rows of ``out``."""
    bits = out.view(np.uint32)
    np.copyto(bits.reshape(-1), np.unpackbits(signs, count=out.size, bitorder="little"))
    bits <<= np.uint32(31)
    _put_scales(out, scales)


def _put_scales(signs: Values, scales: NDArray[np.float32]) -> None:
    """Give each row of zeros and negative zeros the magnitude of its scale."""
    bits = signs.view(np.uint32)
    np.bitwise_or(bits, scales.view(np.uint32)[:, np.newaxis], out=bits)


def _bytes_of(piece: BlockRange) -> slice:
    """Return the range of the signs of a piece, which begins at a whole byte."""
    return slice(piece.values.start // 8, count_blocks(piece.values.stop, 8))


def _split(encoded: Bytes, count: int) -> tuple[NDArray[np.float32], Bytes]:
    """Return views of the scales and of the signs."""
    scales = 4 * count_blocks(count, BLOCK)
    return encoded[:scales].view("<f4"), encoded[scales:]
