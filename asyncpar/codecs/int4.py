"""Four-bit integers with one scale per block.

Layout of ``n`` encoded values, ``b = ceil(n / 128)`` blocks, no padding::

    offset 0      b little-endian bfloat16 scales
    offset 2 b    ceil(n / 2) bytes: the level of value 2 j plus 8 in the low four bits of byte j, that of value 2 j + 1
                  plus 8 in the high ones, which are 0 where there is no such value

Value ``i`` decodes to ``scale[i // 128] * level`` in float32.  Levels are -7 to 7.  The scale of a block is its largest
magnitude over 7.46, rounded to bfloat16: the largest value then rounds to 7, and no error is above half a scale.  Short
scales for small blocks lose less than float32 scales for blocks of 256, which take as many bytes: 1.2 % instead of
1.4 % of the squared norm of normal deviates, 4.6 instead of 6.9 % of Student's t with three degrees of freedom.

A block whose scale would be subnormal is sent as zeros.  Level -8 is never written, but accepted.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import (
    PIECE,
    BlockRange,
    Bytes,
    Codec,
    Values,
    check_decode,
    check_encode,
    corrected,
    count_blocks,
    largest_magnitudes,
    plan_pieces,
    scratch,
)
from asyncpar.errors import ProtocolError

_Words: TypeAlias = NDArray[np.uint16]

BLOCK = 128
"""Values that share a scale."""

_LEVELS = 7.0
_OFFSET = 8
_REACH = 7.46
"""The largest magnitude of a block over its scale: below 7.5 however the scale is rounded."""

_LARGEST_STEP = (1.0 + 2.0**-8) / _REACH
"""The largest scale of a block whose largest magnitude is 1."""

_WORST_OF_LARGEST = 1.0 - _LEVELS / 8.0 * (1.0 - 2.0**-8)
"""The fraction of its largest value that a block may lose by clipping."""

_SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST_SCALE = np.float32((1.0 - 2.0**-8) * 2.0**125)
"""No level times this scale is infinite.  Magnitudes within 13 % of the largest float32 are clipped for that."""


class Int4(Codec):
    """Two values per byte and one scale per 128: 7.76 times smaller than float32.  Not summable."""

    name = "int4"

    def encoded_bytes(self, count: int) -> int:
        return 2 * count_blocks(count, BLOCK) + count_blocks(count, 2)

    def error_bound(self, values: Values) -> float:
        largest = float(np.abs(values).max(initial=0.0))
        clipping = largest - _LEVELS * float(_LARGEST_SCALE)
        return max(largest * _LARGEST_STEP / 2.0, clipping, _REACH * float(_SMALLEST_SCALE))

    def contraction(self, count: int) -> float:
        """Return the worst case: all but the largest value are half a step, the farthest from levels for their size."""
        others = max(min(count, BLOCK) - 1, 0)
        return (1.0 - _WORST_OF_LARGEST**2) / (1.0 + others * (_LARGEST_STEP / 2.0) ** 2)

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        scales, pairs = _split(out, values.size)
        room, steps, divisors = scratch(values.size), scratch(values.size), scratch(values.size)
        words, shifted = _scratch_words(values.size)
        for piece in plan_pieces(values.size, BLOCK):
            x = corrected(values, residual, lost, piece.values, room)
            step, divisor = steps[: piece.size], divisors[: piece.size]
            scale = _choose_scales(x.reshape(piece.shape), step.reshape(piece.shape))
            scales[piece.blocks] = scale.view(np.uint16)
            _spread_divisors(scale, divisor.reshape(piece.shape))
            np.divide(x, divisor, out=step)
            np.rint(step, out=step)
            if (scale == _LARGEST_SCALE).any():
                np.clip(step, -_LEVELS, _LEVELS, out=step)
            _pack(step, pairs[_bytes_of(piece)], words, shifted)
            if lost is not None:
                step *= divisor
                x -= step

    def decode(self, encoded: Bytes, out: Values) -> None:
        scales, pairs = self._check(encoded, out)
        factors, words = scratch(out.size), _scratch_words(out.size)
        for piece in plan_pieces(out.size, BLOCK):
            _unpack(pairs[_bytes_of(piece)], out[piece.values], *words)
            _scale(out[piece.values], scales[piece.blocks], piece, factors)

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        scales, pairs = self._check(encoded, out)
        room, factors, words = scratch(out.size), scratch(out.size), _scratch_words(out.size)
        with np.errstate(over="ignore"):
            for piece in plan_pieces(out.size, BLOCK):
                decoded = room[: piece.size]
                _unpack(pairs[_bytes_of(piece)], decoded, *words)
                _scale(decoded, scales[piece.blocks], piece, factors)
                out[piece.values] += decoded

    def _check(self, encoded: Bytes, out: Values) -> tuple[NDArray[np.float32], Bytes]:
        """Return the scales and pairs of ``encoded``, which fit ``out`` and are in range."""
        check_decode(self, encoded, out)
        words, pairs = _split(encoded, out.size)
        scales = words.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        if not ((scales >= 0.0) & (scales <= _LARGEST_SCALE)).all():  # also refuses NaN
            raise ProtocolError(f"{self.name}: expected scales in 0..{_LARGEST_SCALE:.3g}, got others")
        if out.size % 2 and pairs[-1] >> 4:
            raise ProtocolError(f"{self.name}: expected zeros after the last of {out.size} values, got others")
        return scales, pairs


def _choose_scales(x: Values, room: Values) -> NDArray[Any]:
    """Return the scale of each row of ``x`` in bfloat16."""
    scale = largest_magnitudes(x, room)
    scale /= np.float32(_REACH)
    np.minimum(scale, _LARGEST_SCALE, out=scale)
    scale[scale < _SMALLEST_SCALE] = 0.0
    return scale.astype(ml_dtypes.bfloat16)


def _spread_divisors(scales: NDArray[Any], out: Values) -> None:
    """Fill each row of ``out`` with its scale, or 1 for 0, so that quotients of zeros round to 0."""
    divisors = scales.astype(np.float32)
    divisors[divisors == 0.0] = 1.0
    np.copyto(out, divisors[:, np.newaxis])


def _pack(steps: Values, out: Bytes, words: _Words, shifted: _Words) -> None:
    """Write levels, given as floats, into ``out``, two per byte."""
    words, shifted = words[: out.size], shifted[: out.size]
    stored = words.view(np.int8)
    np.copyto(stored[: steps.size], steps, casting="unsafe")
    stored += np.int8(_OFFSET)
    stored[steps.size :] = 0
    np.right_shift(words, np.uint16(4), out=shifted)
    words |= shifted
    np.copyto(out, words, casting="unsafe")  # the low byte


def _unpack(pairs: Bytes, out: Values, words: _Words, shifted: _Words) -> None:
    """Write levels, as floats, into ``out``."""
    words, shifted = words[: pairs.size], shifted[: pairs.size]
    np.copyto(words, pairs)
    np.left_shift(words, np.uint16(4), out=shifted)
    words |= shifted
    words &= np.uint16(0x0F0F)
    levels = words.view(np.int8)
    levels -= np.int8(_OFFSET)
    np.copyto(out, levels[: out.size])


def _scale(levels: Values, scales: NDArray[np.float32], piece: BlockRange, factors: Values) -> None:
    """Multiply ``levels`` by the scales of their blocks."""
    factor = factors[: piece.size]
    np.copyto(factor.reshape(piece.shape), scales[:, np.newaxis])
    levels *= factor


def _scratch_words(count: int) -> _Words:
    """Return two rows of memory for the levels of the largest piece, two per word, the first in the low byte."""
    return np.empty((2, count_blocks(min(PIECE, count), 2)), "<u2")


def _bytes_of(piece: BlockRange) -> slice:
    """Return the range of the pairs of a piece, which begins at an even value."""
    return slice(piece.values.start // 2, count_blocks(piece.values.stop, 2))


def _split(encoded: Bytes, count: int) -> tuple[_Words, Bytes]:
    """Return views of the scales, as words, and of the pairs."""
    scales = 2 * count_blocks(count, BLOCK)
    return encoded[:scales].view("<u2"), encoded[scales:]
