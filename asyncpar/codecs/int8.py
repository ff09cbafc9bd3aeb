"""Eight-bit integers with one scale per block.

Layout of ``n`` encoded values, ``b = ceil(n / 1024)`` blocks, no padding::

    offset 0      b little-endian float32 scales
    offset 4 b    n signed bytes

Value ``i`` decodes to ``scale[i // 1024] * byte[i]`` in float32.  The scale of a block is its largest magnitude over
127, so the error of each value is at most half a scale, but for rounding in the last place.  A block whose scale would
be subnormal is sent as zeros.  -128 is never written, and is refused nowhere: it decodes like any other byte.

The work goes through the arrays once, in pieces that stay in the cache: plain numpy then runs near the speed of memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Bytes, Codec, Values, check_decode, check_encode
from asyncpar.errors import NonFiniteValue, ProtocolError

BLOCK = 1024
"""Values that share a scale."""

_PIECE = 64 * BLOCK
_LEVELS = 127.0
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST_SCALE = np.float32(np.finfo(np.float32).max / 128.0)
"""No byte times this scale is infinite.  Magnitudes within 1 % of the largest float32 are clipped for it."""


class Int8(Codec):
    """One signed byte per value and one scale per 1,024: 3.98 times smaller than float32.  Not summable."""

    name = "int8"

    def encoded_bytes(self, count: int) -> int:
        return count + 4 * _count_blocks(count)

    def error_bound(self, values: Values) -> float:
        largest = float(np.abs(values).max(initial=0.0))
        rounding = 0.5 * largest / _LEVELS * (1.0 + 2.0**-14)
        clipping = max(0.0, largest - _LEVELS * float(_LARGEST_SCALE))
        return max(rounding + clipping, _LEVELS * float(_SMALLEST_SCALE))

    def contraction(self, count: int) -> float:  # noqa: ARG002
        return 1.0 - BLOCK / (2.0 * _LEVELS) ** 2 * (1.0 + 2.0**-12)

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        scales, levels = _split(out, values.size)
        corrected = np.empty(min(_PIECE, values.size), np.float32)
        scratch = np.empty_like(corrected)
        for start in range(0, values.size, _PIECE):
            stop = min(start + _PIECE, values.size)
            x = corrected[: stop - start] if lost is None else lost[start:stop]
            if residual is None:
                x[:] = values[start:stop]
            else:
                with np.errstate(over="ignore", invalid="ignore"):  # found when the block's magnitude is taken
                    np.add(values[start:stop], residual[start:stop], out=x)
            _encode_piece(x, scales[start // BLOCK :], levels[start:stop], scratch=scratch[: stop - start])
            if lost is not None:
                x -= scratch[: stop - start]

    def decode(self, encoded: Bytes, out: Values) -> None:
        check_decode(self, encoded, out)
        scales, levels = _split(encoded, out.size)
        if not ((scales >= 0.0) & (scales <= _LARGEST_SCALE)).all():  # also refuses NaN
            raise ProtocolError(f"{self.name}: expected scales in 0..{_LARGEST_SCALE:.3g}, got others")
        for start in range(0, out.size, _PIECE):
            stop = min(start + _PIECE, out.size)
            for rows, part in _block_rows(stop - start):
                blocks = slice(start // BLOCK + rows.start, start // BLOCK + rows.stop)
                shape = (rows.stop - rows.start, -1)
                piece = slice(start + part.start, start + part.stop)
                np.multiply(levels[piece].reshape(shape), scales[blocks, np.newaxis], out=out[piece].reshape(shape))


def _encode_piece(x: Values, scales: NDArray[np.float32], levels: NDArray[np.int8], *, scratch: Values) -> None:
    """Encode a few whole blocks, the last of which may be short; leave their decoded values in ``scratch``."""
    for rows, part in _block_rows(x.size):
        shape = (rows.stop - rows.start, -1)
        block, steps = x[part].reshape(shape), scratch[part].reshape(shape)
        np.abs(block, out=steps)
        scale = steps.max(axis=1)
        if not np.isfinite(scale).all():
            raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
        scale /= np.float32(_LEVELS)
        np.minimum(scale, _LARGEST_SCALE, out=scale)
        scale[scale < _SMALLEST_SCALE] = 0.0
        scales[rows] = scale
        inverse = np.divide(np.float32(1.0), scale, out=np.zeros_like(scale), where=scale > 0.0)
        np.multiply(block, inverse[:, np.newaxis], out=steps)
        np.rint(steps, out=steps)
        if (scale == _LARGEST_SCALE).any():
            np.clip(steps, -_LEVELS, _LEVELS, out=steps)
        np.copyto(levels[part].reshape(shape), steps, casting="unsafe")
        steps *= scale[:, np.newaxis]


def _block_rows(size: int) -> list[tuple[slice, slice]]:
    """Return (blocks, values) of the whole blocks, and of the short last one, where they exist."""
    whole = size // BLOCK
    parts = [(slice(0, whole), slice(0, whole * BLOCK))] if whole else []
    if size % BLOCK:
        parts.append((slice(whole, whole + 1), slice(whole * BLOCK, size)))
    return parts


def _count_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _split(encoded: Bytes, count: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Return views of the scales and of the signed bytes."""
    scales = 4 * _count_blocks(count)
    return encoded[:scales].view("<f4"), encoded[scales:].view(np.int8)
