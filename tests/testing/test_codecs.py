"""The conformance suite of codecs catches codecs that break their promises."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.codecs import Bytes, Codec, Identity, Int8, Values
from asyncpar.testing.codecs import CodecConformance


class Broken(Int8):
    """Keeps its promises until a subclass breaks one."""


class Forgetful(Broken):
    """Never sends what it owed."""

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        super().encode(values, out, lost=lost)


class Boastful(Broken):
    """Promises to lose less than it does."""

    def contraction(self, count: int) -> float:
        return 1.0

    def error_bound(self, values: Values) -> float:
        return 0.0


class Trusting(Broken):
    """Writes before it has checked."""

    def decode(self, encoded: Bytes, out: Values) -> None:
        out.fill(0.0)
        super().decode(encoded, out)


class Doubling(Broken):
    """Adds twice."""

    def decode_add(self, encoded: Bytes, out: Values) -> None:
        super().decode_add(encoded, out)
        super().decode_add(encoded, out)


class Misnamed(Identity):
    """Is not to be summed as what it says."""

    sum_dtype = np.dtype(np.int32)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("codec", "test"),
    [
        (Forgetful(), "test_error_feedback_keeps_what_is_not_sent_yet_within_the_bound_for_ever"),
        (Forgetful(), "test_the_residual_is_added_before_encoding"),
        (Forgetful(), "test_lost_is_what_the_encoded_form_misses"),
        (Boastful(), "test_the_decoded_form_is_as_near_as_the_contraction_says"),
        (Boastful(), "test_errors_stay_within_the_bound"),
        (Trusting(), "test_a_wrong_length_is_a_protocol_error_and_touches_nothing"),
        (Trusting(), "test_hostile_bytes_decode_to_finite_values_or_a_protocol_error_that_touches_nothing"),
        (Doubling(), "test_decode_add_is_decode_and_then_add"),
        (Misnamed(), "test_a_summable_codec_may_be_summed_in_encoded_form"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_promise_is_found(codec: Codec, test: str) -> None:
    class Suite(CodecConformance):
        def make(self) -> Codec:
            return codec

    with pytest.raises((AssertionError, ValueError)):
        getattr(Suite(), test)()
