"""The interfaces of codecs, and common parts of those with a scale per block of values.

A codec has no state of its own: the encoding error is returned to the caller, who adds it to the next values (error
feedback, Seide et al. 2014; Karimireddy et al. 2019).  The caller decides to which values it belongs.

A vector is processed once, in pieces that stay in the cache: then plain numpy runs near the speed of memory.  Three
more things matter.  Arithmetic in place is half as fast again as arithmetic into a third array.  The magnitudes of
floats are ordered like their bits as integers, of which the largest is found twice as fast.  And if a row has one
scale, numpy copies the scales into its buffer, value by value, unless the buffer is as short as a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import NonFiniteValue, ProtocolError, UsageError

Values: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]


class Codec(ABC):
    """Turns float32 vectors into bytes, whose number is known in advance, and back.

    All arrays are one-dimensional and contiguous, and belong to the caller.  Equal input gives equal bytes on every
    machine of one floating-point standard, and equal bytes decode to equal values.
    """

    name: str
    """Its name in options, with arguments: ``int8``, ``topk:0.01``, ``topk:0.01+int8``."""

    sum_dtype: np.dtype[Any] | None = None
    """The dtype in which encoded forms may be summed; the sum decodes to the sum of the values, up to rounding.

    None: encoded forms cannot be summed.
    """

    def __eq__(self, other: object) -> bool:
        """Codecs of one kind with the same arguments are equal."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    @property
    def is_summable(self) -> bool:
        """Whether encoded forms can be summed without decoding, for example by an all-reduce."""
        return self.sum_dtype is not None

    @property
    def can_be_followed(self) -> bool:
        """Whether it selects values, which another codec may encode.  If so, ``followed_by`` is defined."""
        return False

    def followed_by(self, values: Codec) -> Codec:
        """Return the codec with its selected values encoded by ``values``; ``UsageError`` if it does not select any."""
        raise UsageError(f"codec: {values.name} cannot follow {self.name}, which selects no values")

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the exact size of ``count`` encoded values."""

    @abstractmethod
    def error_bound(self, values: Values) -> float:
        """Return a bound on the absolute difference between any of ``values`` and its decoded form."""

    @abstractmethod
    def contraction(self, count: int) -> float:
        """Return a delta > 0 with ``|x - decoded|^2 <= (1 - delta) |x|^2`` for all vectors ``x`` of ``count`` values.

        A format with a limited range states the magnitudes for which it holds.  Codecs that draw at random guarantee it
        for the mean over draws.  Error feedback keeps the unsent amount within ``2 / delta`` times the largest norm of
        the gradients (Karimireddy et al. 2019, lemma 3).
        """

    def gain(self, count: int) -> float:  # noqa: ARG002
        """Return the factor that compensates, in the mean over draws, for the ``count`` values that are not sent.

        It is 1 for codecs that send all.  Decoded sums are multiplied by it without error feedback, which would send
        the rest later.
        """
        return 1.0

    @abstractmethod
    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        """Write the encoded form of ``values + residual`` into ``out``, and its error into ``lost``.

        ``lost`` becomes ``values + residual - decoded`` and may be the array ``residual``, not ``values``.  ``values``
        and ``residual`` are otherwise unchanged.  Raises ``NonFiniteValue`` for NaN or infinity, which leaves ``out``
        and ``lost`` undefined, and ``UsageError`` for arrays that do not fit.
        """

    @abstractmethod
    def decode(self, encoded: Bytes, out: Values) -> None:
        """Write the values of ``encoded`` into ``out``.

        ``encoded`` is not trusted: raises ``ProtocolError``, with ``out`` unchanged, unless it has exactly the length
        required by ``out`` and everything in it is in range.
        """

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        """Add the values of ``encoded`` to ``out``; otherwise like ``decode``.  May overflow to infinity."""
        check_decode(self, encoded, out)
        decoded = np.empty_like(out)
        self.decode(encoded, decoded)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(out, decoded, out=out)

    def at(self, *place: int) -> Self:  # noqa: ARG002
        """Return the codec for one ``place``, such as a step and a bucket, which is the same on all ranks.

        Codecs that draw at random draw the same numbers for the same place, and others for another.
        """
        return self


class RoundEncoder(ABC):
    """Memory and state of a ``RoundCodec`` for arrays of fixed shapes, which lie one after another.

    For each step: ``start``; then for each round, replace ``messages[index]`` by its mean over ranks and call
    ``advance(index)``; then ``finish``.  All ranks get the same bits if the means have the same bits.  A step that is
    abandoned before ``finish`` changes no state.
    """

    messages: tuple[Values, ...]
    """The vector that is sent in each round; the first is filled by ``start``, the next by ``advance``."""

    @abstractmethod
    def start(self, values: Values, *, residual: Values | None = None) -> None:
        """Read ``values + residual`` and fill the first message; neither array may change until ``finish``.

        Raises ``NonFiniteValue`` for NaN or infinity.
        """

    @abstractmethod
    def advance(self, index: int) -> None:
        """Take the mean in ``messages[index]``; fill the next message, if there is one."""

    @abstractmethod
    def finish(self, out: Values, *, lost: Values | None = None) -> None:
        """Write the approximate mean of ``values + residual`` over ranks into ``out``.

        ``lost`` becomes the error of this rank's messages for its ``values + residual``, and may be the array
        ``residual``: the means over ranks of ``lost`` and of ``out`` add up to that of ``values + residual``.
        """

    @abstractmethod
    def commit(self) -> None:
        """Keep the state of the last step, for a warm start of the next one."""

    def reserve_residual(self) -> None:  # noqa: B027
        """Allocate the memory that ``start`` allocates at its first residual, so that its size is known."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the encoder holds."""
        return sum(message.nbytes for message in self.messages)

    @abstractmethod
    def state(self) -> list[Values | None]:
        """Return a copy of the state of each array, flat, equal on all ranks; None for arrays that have none."""

    @abstractmethod
    def restore(self, state: Sequence[Values | None]) -> None:
        """Restore ``state``; None, and arrays of another size, reset it."""


class RoundCodec(ABC):
    """Approximates the mean over ranks in rounds of float32 messages that can be summed, such as PowerSGD."""

    name: str
    """Its name in options, with arguments: ``powersgd:4``."""

    def __eq__(self, other: object) -> bool:
        """Codecs of one kind with the same arguments are equal."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    @abstractmethod
    def encoder(self, shapes: Sequence[tuple[int, ...]]) -> RoundEncoder:
        """Return an encoder for arrays of ``shapes``, in that order, in its initial state, equal on all ranks."""


def check_encode(
    codec: Codec, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None
) -> None:
    """Raise ``UsageError`` unless the arguments of ``encode`` match."""
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


PIECE = 1 << 18
"""Values per piece: a MiB of float32.  With smaller pieces, the calls take more than the cache saves."""

_INFINITY_BITS = 0x7F800000
_SIGN_BIT = 0x80000000


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A range of blocks of equal width in a vector, and of its values."""

    blocks: slice
    values: slice
    shape: tuple[int, int]
    """The number of blocks, and of values in each."""

    @property
    def size(self) -> int:
        """The number of values."""
        return self.shape[0] * self.shape[1]


def plan_pieces(count: int, block: int) -> Iterator[BlockRange]:
    """Yield the pieces of ``count`` values in blocks of ``block``: whole blocks, then a short last one alone."""
    whole, per_piece = count // block, PIECE // block
    for first in range(0, whole, per_piece):
        last = min(first + per_piece, whole)
        yield BlockRange(slice(first, last), slice(first * block, last * block), (last - first, block))
    if count % block:
        yield BlockRange(slice(whole, whole + 1), slice(whole * block, count), (1, count % block))


def count_blocks(count: int, block: int) -> int:
    """Return the number of blocks of ``count`` values."""
    return -(-count // block)


def scratch(count: int) -> Values:
    """Return room for the largest piece of ``count`` values."""
    return np.empty(min(PIECE, count), np.float32)


@contextmanager
def row_buffers(block: int) -> Iterator[None]:
    """Make numpy's buffers, of this context, as long as a block."""
    before = np.setbufsize(block)
    try:
        yield
    finally:
        np.setbufsize(before)


def corrected(values: Values, residual: Values | None, lost: Values | None, part: slice, room: Values) -> Values:
    """Return ``part`` of ``values + residual``, maybe not finite: in ``lost``, else in ``room``, or unchanged."""
    x = values[part]
    if residual is None and lost is None:
        return x
    total = room[: x.size] if lost is None else lost[part]
    if residual is None:
        np.copyto(total, x)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(x, residual[part], out=total)
    return total


def is_finite(x: Values) -> bool:
    """Return whether ``x`` is finite: as integers, infinity and NaN are the largest, without and with the sign."""
    positive, negative = x.view("<i4").max(initial=0), x.view("<u4").max(initial=0)
    return bool(positive < _INFINITY_BITS and negative < _SIGN_BIT | _INFINITY_BITS)


def largest_magnitudes(x: Values, room: Values) -> Values:
    """Return the largest magnitude in each row of ``x``; ``room`` is as large as ``x``.

    Raises ``NonFiniteValue`` for NaN or infinity.
    """
    np.abs(x, out=room)
    bits = np.maximum.reduceat(room.reshape(-1).view(np.int32), np.arange(0, x.size, x.shape[1]))
    if bits.max(initial=0) >= _INFINITY_BITS:
        raise NonFiniteValue("values: expected finite numbers, got NaN or infinity")
    return bits.view(np.float32)


def inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inverse of each scale, zero for zero."""
    if scales.min(initial=1.0) > 0.0:
        return np.float32(1.0) / scales
    return np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > 0.0)
