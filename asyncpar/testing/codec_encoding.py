"""Conformance of codecs, first half: encoded forms, and the error that they leave in the residual."""

from __future__ import annotations

import re
from math import sqrt

import numpy as np

from asyncpar.codecs import Codec, Values
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.testing.codec_samples import (
    COUNTS,
    CodecSuite,
    decoded,
    draw,
    empty,
    encoded,
    expect,
    norm,
    round_trip,
    samples,
)

_DRAWS = 32
_FEEDBACK_COUNT = 64
"""Few values, so the worst case that ``contraction`` promises is not far from the actual one."""


class CodecEncoding(CodecSuite):
    """Sizes and bounds hold, encoding is repeatable, and ``lost`` accounts for everything that is lost."""

    def test_it_has_a_name_that_can_be_written_in_an_option(self) -> None:
        assert re.fullmatch(r"[a-z0-9_]+(:[0-9.e-]+)*(\+[a-z0-9_]+(:[0-9.e-]+)*)*", self.make().name)

    def test_the_encoded_size_is_known_beforehand_and_grows(self) -> None:
        codec = self.make()
        sizes = [codec.encoded_bytes(count) for count in COUNTS]
        assert sizes == sorted(sizes)
        assert codec.encoded_bytes(0) == 0

    def test_errors_stay_within_the_bound(self) -> None:
        codec = self.make()
        for values in samples():
            error = np.abs(round_trip(codec, values).astype(np.float64) - values).max(initial=0.0)
            assert error <= codec.error_bound(values)

    def test_the_decoded_form_is_as_near_as_the_contraction_says(self) -> None:
        codec = self.make()
        least, most = self.contracts_within
        places = range(_DRAWS if self.draws_at_random else 1)
        for values in samples():
            if not least <= float(np.abs(values).max(initial=0.0)) <= most:
                continue
            delta = codec.contraction(values.size)
            assert 0.0 < delta <= 1.0
            missing = np.array([_missing_share(codec.at(place), values) for place in places])
            doubt = 5.0 * missing.std() / sqrt(len(places))
            assert missing.mean() <= 1.0 - delta + doubt + 1e-9

    def test_zeros_stay_zeros(self) -> None:
        np.testing.assert_array_equal(round_trip(self.make(), np.zeros(3000, np.float32)), 0.0)

    def test_encoding_is_repeatable_fills_all_bytes_and_leaves_values_alone(self) -> None:
        codec = self.make()
        for values in samples():
            kept = values.copy()
            zeros, ones = np.zeros_like(empty(codec, values.size)), np.full_like(empty(codec, values.size), 255)
            codec.encode(values, zeros)
            codec.encode(values, ones)
            np.testing.assert_array_equal(zeros, ones)
            np.testing.assert_array_equal(values, kept)

    def test_one_place_draws_the_same_and_others_differ_if_anything_is_drawn(self) -> None:
        values = draw(5000)
        one, again = encoded(self.make().at(3, 5), values), encoded(self.make().at(3, 5), values)
        np.testing.assert_array_equal(one, again)
        for place in ((3, 6), (4, 5), (5, 3), (3,), (35,)):
            assert (encoded(self.make().at(*place), values).tobytes() != one.tobytes()) == self.draws_at_random

    def test_the_residual_is_added_before_encoding(self) -> None:
        codec = self.make()
        for values in samples():
            residual = values[::-1] * np.float32(0.01)
            kept = residual.copy()
            both = encoded(codec, values, residual)
            np.testing.assert_array_equal(both, encoded(codec, values + residual))
            np.testing.assert_array_equal(residual, kept)

    def test_lost_is_what_the_encoded_form_misses(self) -> None:
        codec = self.make()
        for values in samples():
            residual = values[::-1] * np.float32(0.01)
            lost, out = np.full_like(values, 7.0), empty(codec, values.size)
            codec.encode(values, out, residual=residual, lost=lost)
            missing = values + residual - decoded(codec, out, values.size)
            np.testing.assert_allclose(lost, missing, rtol=1e-5, atol=1e-30)
            codec.encode(values, out, lost=lost)
            np.testing.assert_allclose(lost, values - decoded(codec, out, values.size), rtol=1e-5, atol=1e-30)

    def test_lost_may_be_the_residual_itself(self) -> None:
        codec = self.make()
        values = draw(5000)
        residual = values[::-1] * np.float32(0.01)
        lost, out = np.empty_like(values), empty(codec, values.size)
        codec.encode(values, out, residual=residual, lost=lost)
        again = empty(codec, values.size)
        codec.encode(values, again, residual=residual, lost=residual)
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(residual, lost)

    def test_error_feedback_keeps_what_is_not_sent_yet_within_the_bound_for_ever(self) -> None:
        """Check the bound of the contraction, over enough steps to exceed it without feedback."""
        codec = self.make()
        values = draw(_FEEDBACK_COUNT)
        shrink = sqrt(1.0 - codec.contraction(values.size))
        bound = shrink / (1.0 - shrink) * norm(values)  # the limit of e <- shrink (e + norm)
        at_once = norm(round_trip(codec, values) - values)
        steps = 20 + (int(3.0 * bound / at_once) if at_once else 0)
        behind = _follow(codec, values, steps)[steps // 2 :]
        rounding = steps * 2.0**-23 * (bound + norm(values))
        assert sqrt(np.mean(np.square(behind))) <= bound + rounding

    def test_values_that_are_not_finite_are_refused(self) -> None:
        codec = self.make()
        for bad in (np.nan, np.inf, -np.inf):
            for place in (0, 2047, 4999):
                values = draw(5000)
                values[place] = bad
                expect(NonFiniteValue, lambda values=values: encoded(codec, values))  # type: ignore[misc]

    def test_a_sum_with_the_residual_that_is_not_finite_is_refused(self) -> None:
        codec = self.make()
        largest = np.full(10, np.finfo(np.float32).max)
        expect(NonFiniteValue, lambda: encoded(codec, largest, largest))
        for bad in (np.nan, np.inf):
            residual = np.full(10, bad, np.float32)
            expect(NonFiniteValue, lambda residual=residual: encoded(codec, largest, residual))  # type: ignore[misc]

    def test_arrays_that_do_not_fit_are_refused(self) -> None:
        codec = self.make()
        values, out = draw(100), empty(codec, 100)
        wide = values.astype(np.float64)
        expect(UsageError, lambda: codec.encode(wide, out))  # type: ignore[arg-type]
        expect(UsageError, lambda: codec.encode(values[::2], empty(codec, 50)))
        expect(UsageError, lambda: codec.encode(values, np.empty(out.size + 1, np.uint8)))
        expect(UsageError, lambda: codec.encode(values, out, residual=values[:50]))
        expect(UsageError, lambda: codec.encode(values, out, lost=values[:50]))
        for decode in (codec.decode, codec.decode_add):
            expect(UsageError, lambda decode=decode: decode(out, values[::2]))  # type: ignore[misc]
            expect(UsageError, lambda decode=decode: decode(out, wide))  # type: ignore[misc]


def _missing_share(codec: Codec, values: Values) -> float:
    """Return the share of the squared norm of ``values`` by which they differ from their decoded form."""
    return (norm(values.astype(np.float64) - round_trip(codec, values)) / norm(values)) ** 2


def _follow(codec: Codec, values: Values, steps: int) -> list[float]:
    """Send ``values`` repeatedly with error feedback; return, after each step, how far the total sent is behind."""
    residual, sent = np.zeros_like(values), np.zeros(values.size)
    behind = []
    for step in range(steps):
        here = codec.at(step)
        out = empty(here, values.size)
        here.encode(values, out, residual=residual, lost=residual)
        sent += decoded(here, out, values.size)
        behind.append(norm((step + 1) * values.astype(np.float64) - sent))
    return behind
