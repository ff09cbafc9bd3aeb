"""Eight-bit integers with one scale per block.

Layout of ``n`` encoded values, ``b = ceil(n / 1024)`` blocks, no padding::

    offset 0      b little-endian float32 scales
    offset 4 b    n signed bytes

Value ``i`` decodes to ``scale[i // 1024] * byte[i]`` in float32.  The scale of a block is its largest magnitude over
127, so the error of each value is at most half a scale, up to rounding in the last place.  A block whose scale would be
subnormal is sent as zeros.  -128 is never written, but accepted: it decodes like any other byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import (
    Bytes,
    Codec,
    Values,
    check_decode,
    check_encode,
    corrected,
    count_blocks,
    inverse,
    largest_magnitudes,
    plan_pieces,
    row_buffers,
    scratch,
)
from asyncpar.errors import ProtocolError

BLOCK = 1024
"""Values that share a scale."""

LEVELS = 127.0
_WORST_OF_LARGEST = 1.0 / 128.0
"""The fraction of its largest value that a block may lose by clipping."""

SMALLEST_SCALE = np.finfo(np.float32).tiny
LARGEST_SCALE = np.float32(np.finfo(np.float32).max / 128.0)
"""No byte times this scale is infinite.  Magnitudes within 1 % of the largest float32 are clipped for that."""


class Int8(Codec):
    """One signed byte per value and one scale per 1,024: 3.98 times smaller than float32.  Not summable."""

    name = "int8"

    def encoded_bytes(self, count: int) -> int:
        return count + 4 * count_blocks(count, BLOCK)

    def error_bound(self, values: Values) -> float:
        largest = float(np.abs(values).max(initial=0.0))
        rounding = 0.5 * largest / LEVELS * (1.0 + 2.0**-14)
        clipping = max(0.0, largest - LEVELS * float(LARGEST_SCALE))
        return max(rounding + clipping, LEVELS * float(SMALLEST_SCALE))

    def contraction(self, count: int) -> float:
        """Return the worst case: all but the largest value are half a step, the farthest from levels for their size."""
        others = max(min(count, BLOCK) - 1, 0)
        return (1.0 - _WORST_OF_LARGEST**2) / (1.0 + others / (2.0 * LEVELS) ** 2 * (1.0 + 2.0**-12))

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        scales, levels = _split(out, values.size)
        room, steps = scratch(values.size), scratch(values.size)
        with row_buffers(BLOCK):
            for piece in plan_pieces(values.size, BLOCK):
                x = corrected(values, residual, lost, piece.values, room).reshape(piece.shape)
                part = steps[: piece.size].reshape(piece.shape)
                scales[piece.blocks] = _quantize(x, part)
                np.copyto(levels[piece.values], part.reshape(-1), casting="unsafe")
                if lost is not None:
                    _dequantize(part, scales[piece.blocks])
                    x -= part

    def decode(self, encoded: Bytes, out: Values) -> None:
        scales, levels = self._check(encoded, out)
        with row_buffers(BLOCK):
            for piece in plan_pieces(out.size, BLOCK):
                np.copyto(out[piece.values], levels[piece.values])
                _dequantize(out[piece.values].reshape(piece.shape), scales[piece.blocks])

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        scales, levels = self._check(encoded, out)
        decoded = scratch(out.size)
        with row_buffers(BLOCK), np.errstate(over="ignore", invalid="ignore"):
            for piece in plan_pieces(out.size, BLOCK):
                part = decoded[: piece.size]
                np.copyto(part, levels[piece.values])
                _dequantize(part.reshape(piece.shape), scales[piece.blocks])
                out[piece.values] += part

    def _check(self, encoded: Bytes, out: Values) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        """Return the scales and levels of ``encoded``, which fit ``out`` and are in range."""
        check_decode(self, encoded, out)
        scales, levels = _split(encoded, out.size)
        if not ((scales >= 0.0) & (scales <= LARGEST_SCALE)).all():  # also refuses NaN
            raise ProtocolError(f"{self.name}: expected scales in 0..{LARGEST_SCALE:.3g}, got others")
        return scales, levels


def _quantize(x: Values, steps: Values) -> NDArray[np.float32]:
    """Write the levels of some blocks, a row each, into ``steps``, and return their scales."""
    scale = largest_magnitudes(x, steps)
    scale /= np.float32(LEVELS)
    is_clipped = scale.max() > LARGEST_SCALE
    if is_clipped:
        np.minimum(scale, LARGEST_SCALE, out=scale)
    if scale.min() < SMALLEST_SCALE:
        scale[scale < SMALLEST_SCALE] = 0.0
    np.multiply(x, inverse(scale)[:, np.newaxis], out=steps)
    np.rint(steps, out=steps)
    if is_clipped:
        np.clip(steps, -LEVELS, LEVELS, out=steps)
    return scale


def _dequantize(steps: Values, scales: NDArray[np.float32]) -> None:
    """Multiply each row of ``steps`` by its scale."""
    np.multiply(steps, scales[:, np.newaxis], out=steps)


def _split(encoded: Bytes, count: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Return views of the scales and of the signed bytes."""
    scales = 4 * count_blocks(count, BLOCK)
    return encoded[:scales].view("<f4"), encoded[scales:].view(np.int8)
