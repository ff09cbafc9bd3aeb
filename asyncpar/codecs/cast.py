"""Values in sixteen bits: bfloat16 or IEEE 754 binary16.

Layout of ``n`` encoded values: ``n`` little-endian words, each the bits of a value in that format.  Encoded forms may
be summed as vectors of that format.

Values are rounded to nearest, ties to even.  A finite value that would become infinite becomes the largest finite one
of its sign instead: beyond 65504 in fp16, within 0.4 % of the largest float32 in bf16.  The clipped amount counts as
lost, so error feedback sends it in the next steps; every rank would refuse to decode infinity, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import (
    PIECE,
    Bytes,
    Codec,
    Values,
    check_decode,
    check_encode,
    corrected,
    plan_pieces,
    scratch,
)
from asyncpar.codecs.half import from_half, to_half
from asyncpar.errors import NonFiniteValue, ProtocolError, UsageError

_Words = NDArray[np.uint16]
_SIGN = np.uint16(0x8000)


def _to_bfloat(x: Values, out: _Words, scratch: Values) -> Values | None:  # noqa: ARG001
    np.copyto(out.view(ml_dtypes.bfloat16), x, casting="unsafe")
    return None


def _from_bfloat(words: _Words, out: Values) -> None:
    np.copyto(out, words.view(ml_dtypes.bfloat16))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """A format of sixteen bits: its range, and the conversions from and to float32."""

    name: str
    dtype: np.dtype[Any]
    infinity: int
    """The bits of infinity; one less is the largest finite value."""
    largest: float
    relative_error: float
    """Bound for normal numbers."""
    absolute_error: float
    """Bound for subnormal numbers."""
    write: Callable[[Values, _Words, Values], Values | None]
    """Writes values as words, with three rows of scratch; returns the written values if they are available."""
    read: Callable[[_Words, Values], None]


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "bfloat16": _Format(
            name="bf16",
            dtype=np.dtype(ml_dtypes.bfloat16),
            infinity=0x7F80,
            largest=(2.0 - 2.0**-7) * 2.0**127,
            relative_error=2.0**-8,
            absolute_error=2.0**-134,
            write=_to_bfloat,
            read=_from_bfloat,
        ),
        "float16": _Format(
            name="fp16",
            dtype=np.dtype("<f2"),
            infinity=0x7C00,
            largest=65504.0,
            relative_error=2.0**-11,
            absolute_error=2.0**-25,
            write=to_half,
            read=from_half,
        ),
    }
)


class Cast(Codec):
    """``bf16`` or ``fp16``: half the size of float32, and summable in that format.

    ``contraction`` holds for vectors whose root mean square is at least 2^-100 in bf16; in fp16 at least 2^-11, and
    whose values are within its range.  Smaller values lose precision, and vanish below 2^-25 in fp16.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in _FORMATS:
            raise UsageError(f"dtype: expected one of {', '.join(_FORMATS)}, got {dtype!r}")
        self._format = _FORMATS[dtype]
        self.name = self._format.name
        self.sum_dtype = self._format.dtype

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def error_bound(self, values: Values) -> float:
        largest = float(np.abs(values).max(initial=0.0))
        rounding = max(self._format.relative_error * largest, self._format.absolute_error)
        return max(rounding, largest - self._format.largest)

    def contraction(self, count: int) -> float:  # noqa: ARG002
        return 1.0 - self._format.relative_error**2 * (1.0 + 2.0**-5)

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        words = out.view("<u2")
        room, spare = scratch(values.size), np.empty((3, min(PIECE, values.size)), np.float32)
        for piece in plan_pieces(values.size, PIECE):
            x = corrected(values, residual, lost, piece.values, room)
            written = words[piece.values]
            decoded = self._format.write(x, written, spare[:, : piece.size])
            if self._reaches_infinity(written):
                self._clip(x, written)
                decoded = None
            if lost is not None:
                if decoded is None:
                    decoded = spare[0, : piece.size]
                    self._format.read(written, decoded)
                x -= decoded

    def decode(self, encoded: Bytes, out: Values) -> None:
        words = self._check(encoded, out)
        for piece in plan_pieces(out.size, PIECE):
            self._format.read(words[piece.values], out[piece.values])

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        words = self._check(encoded, out)
        room = scratch(out.size)
        with np.errstate(over="ignore"):
            for piece in plan_pieces(out.size, PIECE):
                decoded = room[: piece.size]
                self._format.read(words[piece.values], decoded)
                out[piece.values] += decoded

    def _check(self, encoded: Bytes, out: Values) -> _Words:
        """Return the words of ``encoded``, which fit ``out`` and are finite."""
        check_decode(self, encoded, out)
        words = encoded.view("<u2")
        if any(self._reaches_infinity(words[piece.values]) for piece in plan_pieces(out.size, PIECE)):
            raise ProtocolError(f"{self.name}: expected finite numbers, got NaN or infinity")
        return words

    def _reaches_infinity(self, words: _Words) -> bool:
        """Return whether any of ``words`` is infinite or NaN, as integers the largest, without and with the sign."""
        return bool(words.view("<i2").max() >= self._format.infinity or words.max() >= _SIGN | self._format.infinity)

    def _clip(self, x: Values, words: _Words) -> None:
        """Replace infinities that ``x`` does not have."""
        if not np.isfinite(x).all():
            raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
        infinite = (words & ~_SIGN) == self._format.infinity
        words[infinite] -= np.uint16(1)
