"""What goes before every message between two ranks: dtype and shape, in a fixed number of bytes.  Pure."""

from __future__ import annotations

import math
import struct
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from asyncpar.collectives.reduction import Array
from asyncpar.errors import ProtocolError, UsageError

MAX_DIMENSIONS: Final = 16
_MAX_BYTES: Final = 1 << 62
_LAYOUT = struct.Struct(f"<BBB5xQ{MAX_DIMENSIONS}Q")
ENVELOPE_BYTES: Final = _LAYOUT.size

_NAMES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(name) for name in _NAMES),
    np.dtype(ml_dtypes.bfloat16),
)


class Envelope(NamedTuple):
    """An array of ``shape`` and ``dtype`` follows; ``is_object`` says that it is the bytes of an encoded object."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_object: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return "an object" if self.is_object else f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


def encode_envelope(array: Array, *, is_object: bool) -> bytes:
    """Return the envelope of ``array``.  Raises ``UsageError`` for what cannot be sent."""
    if array.dtype not in _DTYPES:
        raise UsageError(f"x: expected one of {', '.join(dtype.name for dtype in _DTYPES)}, got {array.dtype.name}")
    if array.ndim > MAX_DIMENSIONS:
        raise UsageError(f"x: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}; reshape it")
    dims = (*array.shape, *(0 for _ in range(MAX_DIMENSIONS - array.ndim)))
    return _LAYOUT.pack(_DTYPES.index(array.dtype), array.ndim, is_object, array.nbytes, *dims)


def decode_envelope(content: bytes | bytearray) -> Envelope:
    """Return what ``encode_envelope`` encoded.  Raises ``ProtocolError`` for anything else."""
    code, ndim, is_object, nbytes, *dims = _LAYOUT.unpack(content)
    if code >= len(_DTYPES) or ndim > MAX_DIMENSIONS or is_object > 1:
        raise ProtocolError(
            f"message envelope: dtype {code}, {ndim} dimensions and kind {is_object} are not known here"
        )
    envelope = Envelope(_DTYPES[code], tuple(dims[:ndim]), bool(is_object))
    if any(dims[ndim:]) or math.prod(max(1, dim) for dim in envelope.shape) > _MAX_BYTES // envelope.dtype.itemsize:
        raise ProtocolError(f"message envelope: dimensions {dims[:ndim]} and then {dims[ndim:]} cannot be meant")
    if envelope.nbytes != nbytes:
        raise ProtocolError(f"message envelope: {envelope} has {envelope.nbytes} bytes, but {nbytes} are declared")
    return envelope
