"""Conformance of codecs: the description of the codec under test, and the sample values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.errors import AsyncparError

COUNTS = (0, 1, 2, 7, 63, 64, 65, 1023, 1024, 1025, 5000, 70_000)
"""Sizes around the blocks that a codec may have."""


class CodecSuite(ABC):
    """The codec under test and its special properties; base class of the suites."""

    draws_at_random: ClassVar[bool] = False
    """Whether the codec draws at random; then ``contraction`` holds for the mean, and places draw differently."""

    contracts_within: ClassVar[tuple[float, float]] = (1e-30, 1e39)
    """The range of a vector's largest magnitude for which ``contraction`` is promised: no format reaches everywhere."""

    @abstractmethod
    def make(self) -> Codec:
        """Return the codec under test."""


def draw(count: int) -> Values:
    """Return normal deviates, always the same ones for a given ``count``."""
    return np.random.default_rng(count).normal(0.0, 1.0, count).astype(np.float32)


def samples() -> list[Values]:
    """Return vectors of all sizes, with small and large values mixed, and lone, equal and extreme ones."""
    mixed = draw(4096) * np.repeat(np.array([1e-30, 1.0, 1e30, 1e-3], np.float32), 1024)
    lone = np.full(3000, 1e-3, np.float32)
    lone[1234] = -1.0
    equal = np.full(2500, -0.75, np.float32)
    extremes = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, 0.0, -0.0, 1.0], np.float32)
    subnormal = np.array([1e-45, -1e-40, 1e-38], np.float32)
    return [*(draw(count) for count in COUNTS), mixed, lone, equal, extremes, subnormal]


def empty(codec: Codec, count: int) -> Bytes:
    """Return an empty buffer for ``count`` encoded values."""
    return np.empty(codec.encoded_bytes(count), np.uint8)


def encoded(codec: Codec, values: Values, residual: Values | None = None) -> Bytes:
    """Return the encoded form of ``values + residual``."""
    out = empty(codec, values.size)
    codec.encode(values, out, residual=residual)
    return out


def decoded(codec: Codec, form: Bytes, count: int) -> Values:
    """Return the ``count`` values of an encoded ``form``."""
    out = np.full(count, np.nan, np.float32)
    codec.decode(form, out)
    return out


def round_trip(codec: Codec, values: Values) -> Values:
    """Encode ``values``, and return them decoded."""
    return decoded(codec, encoded(codec, values), values.size)


def norm(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> float:
    """Return the Euclidean norm, without overflow of float32."""
    return float(np.linalg.norm(values.astype(np.float64)))


def expect(error: type[AsyncparError], call: Callable[[], object]) -> None:
    """Assert that ``call`` raises ``error``; without pytest, so the suite needs no test framework."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")
