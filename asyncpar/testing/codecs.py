"""The conformance suite of codecs.  Subclass it in a test module and say which codec to test::

class TestMyCodec(CodecConformance):
    def make(self) -> Codec:
        return MyCodec()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.errors import AsyncparError, NonFiniteValue, ProtocolError, UsageError

COUNTS = (0, 1, 2, 7, 1023, 1024, 1025, 5000, 70_000)
"""Sizes around whatever blocks a codec may have."""


class CodecConformance(ABC):
    """What every codec promises.  All values are drawn from fixed seeds."""

    @abstractmethod
    def make(self) -> Codec:
        """Return the codec under test."""

    def test_the_encoded_size_is_known_beforehand_and_grows(self) -> None:
        codec = self.make()
        sizes = [codec.encoded_bytes(count) for count in COUNTS]
        assert sizes == sorted(sizes)
        assert codec.encoded_bytes(0) == 0

    def test_errors_stay_within_the_bound(self) -> None:
        codec = self.make()
        for values in _samples():
            decoded = _round_trip(codec, values)
            error = np.abs(decoded.astype(np.float64) - values).max(initial=0.0)
            assert error <= codec.error_bound(values)

    def test_zeros_stay_zeros(self) -> None:
        np.testing.assert_array_equal(_round_trip(self.make(), np.zeros(3000, np.float32)), 0.0)

    def test_encoding_is_repeatable_and_leaves_values_alone(self) -> None:
        codec = self.make()
        for values in _samples():
            kept = values.copy()
            np.testing.assert_array_equal(_encode(codec, values), _encode(codec, values))
            np.testing.assert_array_equal(values, kept)

    def test_lost_is_what_the_encoded_form_misses(self) -> None:
        codec = self.make()
        for values in _samples():
            residual = values[::-1] * np.float32(0.01)
            lost, out = np.full_like(values, 7.0), _empty(codec, values.size)
            codec.encode(values, out, residual=residual, lost=lost)
            decoded = np.empty_like(values)
            codec.decode(out, decoded)
            np.testing.assert_allclose(lost, values + residual - decoded, rtol=1e-5, atol=1e-30)

    def test_lost_may_be_the_residual_itself(self) -> None:
        codec = self.make()
        values = _draw(5000)
        residual = values[::-1] * np.float32(0.01)
        lost, out = np.empty_like(values), _empty(codec, values.size)
        codec.encode(values, out, residual=residual, lost=lost)
        again = _empty(codec, values.size)
        codec.encode(values, again, residual=residual, lost=residual)
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(residual, lost)

    def test_error_feedback_makes_sums_over_time_right(self) -> None:
        codec = self.make()
        values, steps = _draw(3000), 50
        residual, sent = np.zeros_like(values), np.zeros(values.size)
        for _ in range(steps):
            out = _empty(codec, values.size)
            codec.encode(values, out, residual=residual, lost=residual)
            decoded = np.empty_like(values)
            codec.decode(out, decoded)
            sent += decoded
        bound = 2 * codec.error_bound(values) + 1e-4 * np.abs(values).max()
        assert np.abs(sent - steps * values.astype(np.float64)).max() <= bound

    def test_values_that_are_not_finite_are_refused(self) -> None:
        codec = self.make()
        for bad in (np.nan, np.inf, -np.inf):
            for place in (0, 2047, 4999):
                values = _draw(5000)
                values[place] = bad
                _expect(NonFiniteValue, lambda values=values: _encode(codec, values))  # type: ignore[misc]

    def test_a_sum_with_the_residual_that_overflows_is_refused(self) -> None:
        codec = self.make()
        largest = np.full(10, np.finfo(np.float32).max)
        _expect(NonFiniteValue, lambda: codec.encode(largest, _empty(codec, 10), residual=largest))

    def test_a_wrong_length_is_a_protocol_error_and_touches_nothing(self) -> None:
        codec = self.make()
        encoded = _encode(codec, _draw(5000))
        for size in (0, 1, encoded.size - 1, encoded.size + 1):
            out = np.full(5000, 7.0, np.float32)
            wrong = np.resize(encoded, size)
            _expect(ProtocolError, lambda wrong=wrong, out=out: codec.decode(wrong, out))  # type: ignore[misc]
            np.testing.assert_array_equal(out, 7.0)

    def test_garbage_decodes_to_finite_values_or_a_protocol_error(self) -> None:
        codec = self.make()
        rng = np.random.default_rng(11)
        for _ in range(50):
            out = np.full(3000, 7.0, np.float32)
            garbage = rng.integers(0, 256, codec.encoded_bytes(3000), dtype=np.uint8)
            try:
                codec.decode(garbage, out)
            except ProtocolError:
                np.testing.assert_array_equal(out, 7.0)
            else:
                assert np.isfinite(out).all()

    def test_arrays_that_do_not_fit_are_refused(self) -> None:
        codec = self.make()
        values, out = _draw(100), _empty(codec, 100)
        wide = values.astype(np.float64)
        _expect(UsageError, lambda: codec.encode(wide, out))  # type: ignore[arg-type]
        _expect(UsageError, lambda: codec.encode(values[::2], _empty(codec, 50)))
        _expect(UsageError, lambda: codec.encode(values, np.empty(out.size + 1, np.uint8)))
        _expect(UsageError, lambda: codec.encode(values, out, residual=values[:50]))
        _expect(UsageError, lambda: codec.decode(out, values[::2]))

    def test_a_summable_codec_may_be_summed_in_encoded_form(self) -> None:
        codec = self.make()
        one, other = _draw(5000), _draw(5000)[::-1].copy()
        if codec.is_summable:
            total = _encode(codec, one).view(np.float32) + _encode(codec, other).view(np.float32)
            decoded = np.empty_like(one)
            codec.decode(total.view(np.uint8), decoded)
            bound = codec.error_bound(one) + codec.error_bound(other)
            np.testing.assert_allclose(decoded, one + other, rtol=1e-6, atol=bound)
        else:
            assert codec.encoded_bytes(one.size) < one.nbytes, "a codec that is neither summable nor smaller is no use"

    def test_it_has_a_name(self) -> None:
        assert self.make().name.isidentifier()


def _draw(count: int) -> Values:
    return np.random.default_rng(count).normal(0.0, 1.0, count).astype(np.float32)


def _samples() -> list[Values]:
    """Return vectors of all sizes, small and large values side by side, and extreme ones."""
    samples = [_draw(count) for count in COUNTS]
    mixed = _draw(4096) * np.repeat(np.array([1e-30, 1.0, 1e30, 1e-3], np.float32), 1024)
    extremes = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, 0.0, -0.0, 1.0], np.float32)
    subnormal = np.array([1e-45, -1e-40, 1e-38], np.float32)
    return [*samples, mixed, extremes, subnormal]


def _empty(codec: Codec, count: int) -> Bytes:
    return np.empty(codec.encoded_bytes(count), np.uint8)


def _encode(codec: Codec, values: Values) -> Bytes:
    out = _empty(codec, values.size)
    codec.encode(values, out)
    return out


def _round_trip(codec: Codec, values: Values) -> Values:
    decoded = np.full_like(values, np.nan)
    codec.decode(_encode(codec, values), decoded)
    return decoded


def _expect(error: type[AsyncparError], call: Callable[[], object]) -> None:
    """Assert that ``call`` raises ``error``; without pytest, so that the suite needs no test framework."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")
