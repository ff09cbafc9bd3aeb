"""The interface of codecs.

A codec has no state of its own: what the encoded form misses is handed back to the caller, who adds it to the next
values (error feedback, Seide et al. 2014; Karimireddy et al. 2019).  Whoever keeps it decides what it belongs to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import ProtocolError, UsageError

Values: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]


class Codec(ABC):
    """Turns float32 vectors into bytes, whose number is known beforehand, and back.

    All arrays are one-dimensional and contiguous, and belong to the caller.  Equal input gives equal bytes on every
    machine of one floating-point standard, and equal bytes decode to equal values.
    """

    name: str
    """Short name, as used in options."""

    is_summable: bool
    """Is the element-wise float32 sum of two encoded forms the encoded form of the sum?"""

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the exact size of ``count`` encoded values."""

    @abstractmethod
    def error_bound(self, values: Values) -> float:
        """Return a bound on the absolute difference between any of ``values`` and its decoded form."""

    @abstractmethod
    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        """Write the encoded form of ``values + residual`` into ``out``, and into ``lost`` what it misses.

        ``lost`` becomes ``values + residual - decoded`` and may be the array ``residual``, not ``values``.  ``values``
        and ``residual`` are otherwise left alone.  Raises ``NonFiniteValue`` for NaN or infinity, when ``out`` and
        ``lost`` hold nothing of use, and ``UsageError`` for arrays that do not fit.
        """

    @abstractmethod
    def decode(self, encoded: Bytes, out: Values) -> None:
        """Write the values of ``encoded`` into ``out``.

        ``encoded`` is not trusted: raises ``ProtocolError``, with ``out`` untouched, unless it is exactly as long as
        ``out`` calls for and everything in it is in range.
        """


def check_encode(
    codec: Codec, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None
) -> None:
    """Raise ``UsageError`` unless the arguments of ``encode`` fit together."""
    check_vector("values", values, np.float32, values.size)
    check_vector("out", out, np.uint8, codec.encoded_bytes(values.size))
    for name, array in (("residual", residual), ("lost", lost)):
        if array is not None:
            check_vector(name, array, np.float32, values.size)


def check_decode(codec: Codec, encoded: Bytes, out: Values) -> None:
    """Raise ``UsageError`` for an unfit ``out``, ``ProtocolError`` for an ``encoded`` of the wrong length."""
    check_vector("out", out, np.float32, out.size)
    if encoded.dtype != np.uint8 or encoded.ndim != 1 or not encoded.flags.c_contiguous:
        raise UsageError(f"encoded: expected a contiguous uint8 vector, got {encoded.dtype} of shape {encoded.shape}")
    expected = codec.encoded_bytes(out.size)
    if encoded.size != expected:
        raise ProtocolError(
            f"{codec.name}: expected {expected} bytes that encode {out.size} values, got {encoded.size} bytes"
        )


def check_vector(name: str, array: NDArray[np.generic], dtype: type[np.generic], size: int) -> None:
    """Raise ``UsageError`` unless ``array`` is a contiguous vector of ``size`` values of ``dtype``."""
    if array.dtype != dtype or array.ndim != 1 or array.size != size or not array.flags.c_contiguous:
        expected = f"a contiguous {np.dtype(dtype)} vector of {size}"
        raise UsageError(f"{name}: expected {expected}, got {array.dtype} of shape {array.shape}")
