"""The wire layout of signs, and what they do at their edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncpar.codecs import Bytes, Sign, Values
from asyncpar.codecs.codec import PIECE
from asyncpar.errors import ProtocolError

CODEC = Sign()
LARGEST = np.finfo(np.float32).max


def encode(values: Values, lost: Values | None = None) -> Bytes:
    out = np.empty(CODEC.encoded_bytes(values.size), np.uint8)
    CODEC.encode(values, out, lost=lost)
    return out


def decode(encoded: Bytes, count: int) -> Values:
    out = np.empty(count, np.float32)
    CODEC.decode(encoded, out)
    return out


def test_the_layout_is_scales_then_bits() -> None:
    values = np.ones(1034, np.float32)
    values[[0, 9, 1023]] = -1.0
    values[1024:] = [2.0, -4.0, 2.0, -4.0, 2.0, -4.0, 2.0, -4.0, 6.0, -0.0]
    encoded = encode(values).tobytes()
    assert encoded[:8] == np.array([1.0, 3.0], "<f4").tobytes()
    assert encoded[8:10] == bytes([0b00000001, 0b00000010])
    assert encoded[10 : 8 + 127] == bytes(125)
    assert encoded[8 + 127 :] == bytes([0b10000000, 0b10101010, 0b00000010])
    assert len(encoded) == CODEC.encoded_bytes(1034) == 8 + 130


def test_a_large_bucket_shrinks_31_times() -> None:
    count = 1 << 20
    assert 4 * count / CODEC.encoded_bytes(count) > 31.0


def test_each_block_has_its_own_scale() -> None:
    values = np.repeat(np.array([1e-6, -1e6], np.float32), 1024)
    np.testing.assert_allclose(decode(encode(values), 2048), values, rtol=1e-6)


def test_the_scale_is_the_mean_magnitude_also_of_a_short_block() -> None:
    assert decode(encode(np.array([1.0, -2.0, 6.0], np.float32)), 3).tolist() == [3.0, -3.0, 3.0]


def test_zeros_beside_other_values_take_a_sign_and_error_feedback_takes_it_back() -> None:
    values = np.array([4.0, 0.0, 0.0, -0.0], np.float32)
    lost = np.empty_like(values)
    assert decode(encode(values, lost), 4).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert lost.tolist() == [3.0, -1.0, -1.0, 1.0]


def test_the_contraction_is_reached_by_a_value_alone() -> None:
    values = np.zeros(1024, np.float32)
    values[77] = -3.0
    missing = np.square(decode(encode(values), 1024) - values).sum() / 9.0
    assert missing == pytest.approx(1 - CODEC.contraction(1024), abs=1e-6)
    assert missing <= 1 - CODEC.contraction(1024)


def test_sums_beyond_float32_still_have_a_mean() -> None:
    values = np.full(2048, LARGEST, np.float32)
    values[1::2] *= -1
    np.testing.assert_array_equal(decode(encode(values), 2048), values)


def test_pieces_meet() -> None:
    values = np.random.default_rng(0).normal(size=2 * PIECE + 1029).astype(np.float32)
    whole = decode(encode(values), values.size)
    parts = [values[:PIECE], values[PIECE : 2 * PIECE], values[2 * PIECE :]]
    np.testing.assert_array_equal(whole, np.concatenate([decode(encode(part.copy()), part.size) for part in parts]))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0])
def test_scales_that_no_encoder_writes_are_refused_before_anything_is_written(scale: float) -> None:
    encoded = encode(np.ones(3000, np.float32))
    encoded[8:12] = np.array([scale], "<f4").view(np.uint8)
    out = np.full(3000, 7.0, np.float32)
    for call in (CODEC.decode, CODEC.decode_add):
        with pytest.raises(ProtocolError, match="sign: expected finite scales that are not negative"):
            call(encoded, out)
        np.testing.assert_array_equal(out, 7.0)


def test_something_after_the_last_value_is_refused() -> None:
    encoded = encode(np.ones(3, np.float32))
    encoded[-1] |= 0x08
    with pytest.raises(ProtocolError, match="sign: expected zeros after the last of 3 values"):
        decode(encoded, 3)


@given(
    arrays.arrays(np.float32, st.integers(0, 2100), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
)
def test_any_finite_values_come_back_within_the_bound_with_their_signs(values: Values) -> None:
    decoded = decode(encode(values), values.size)
    assert np.abs(decoded.astype(np.float64) - values).max(initial=0.0) <= CODEC.error_bound(values)
    assert ((decoded == 0) | (np.signbit(decoded) == np.signbit(values))).all()
