"""The wire layout of int4, and what it does at its edges."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncpar.codecs import Bytes, Int4, Values
from asyncpar.codecs.codec import PIECE
from asyncpar.errors import ProtocolError

CODEC = Int4()
LARGEST = np.finfo(np.float32).max


def encode(values: Values, lost: Values | None = None) -> Bytes:
    out = np.empty(CODEC.encoded_bytes(values.size), np.uint8)
    CODEC.encode(values, out, lost=lost)
    return out


def decode(encoded: Bytes, count: int) -> Values:
    out = np.empty(count, np.float32)
    CODEC.decode(encoded, out)
    return out


def test_the_layout_is_scales_then_pairs_of_levels() -> None:
    values = np.zeros(131, np.float32)
    values[:4] = 7.46, -1.0, 3.2, -7.0
    values[128:] = -14.92, 4.0, 2.0
    encoded = encode(values).tobytes()
    assert encoded[:4] == np.array([1.0, 2.0], ml_dtypes.bfloat16).tobytes() == bytes.fromhex("803f0040")
    assert encoded[4:6] == bytes([0x7F, 0x1B])  # 7 and -1 plus 8, 3 and -7 plus 8
    assert encoded[6:68] == bytes([0x88] * 62)
    assert encoded[68:] == bytes([0xA1, 0x09])  # -7 and 2, then 1 and nothing
    assert len(encoded) == CODEC.encoded_bytes(131) == 70


def test_a_large_bucket_shrinks_7_75_times() -> None:
    count = 1 << 20
    assert 4 * count / CODEC.encoded_bytes(count) > 7.75


def test_each_block_has_its_own_scale() -> None:
    values = np.repeat(np.array([1e-6, 1e6], np.float32), 128)
    np.testing.assert_allclose(decode(encode(values), 256), values, rtol=0.07)


def test_no_error_is_above_half_a_scale() -> None:
    values = np.random.default_rng(0).normal(size=1280).astype(np.float32)
    encoded = encode(values)
    scales = encoded[:20].view(ml_dtypes.bfloat16).astype(np.float32)
    error = np.abs(decode(encoded, values.size) - values).reshape(10, 128)
    assert (error.max(axis=1) <= scales / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", range(0, 256, 7))
def test_however_its_scale_is_rounded_the_largest_value_is_not_clipped(bits: int) -> None:
    largest = np.uint32(0x3F800000 + (bits << 15)).view(np.float32)  # scales of all places between two bfloat16
    encoded = encode(np.array([largest, -largest], np.float32))
    assert encoded[2] == 0x1F
    scale = float(encoded[:2].view(ml_dtypes.bfloat16)[0])
    assert abs(largest - 7 * scale) <= scale / 2


def test_the_squared_error_is_what_the_module_says() -> None:
    rng = np.random.default_rng(0)
    for values, share in ((rng.normal(size=1 << 17), 0.013), (rng.standard_t(3, size=1 << 17), 0.055)):
        x = values.astype(np.float32)
        assert np.square(decode(encode(x), x.size) - x).sum() < share * np.square(x).sum()


def test_the_worst_case_of_the_contraction_is_nearly_reached() -> None:
    values = np.full(128, 0.4999 * 0.1337890625, np.float32)  # below half the scale of a block whose largest is 1
    values[0] = 1.0
    missing = np.square(decode(encode(values), 128) - values).sum() / np.square(values).sum()
    assert 0.9 * (1 - CODEC.contraction(128)) < missing <= 1 - CODEC.contraction(128)


def test_values_near_the_largest_float_are_clipped_and_the_rest_is_lost() -> None:
    values = np.array([LARGEST, -LARGEST, 1e38], np.float32)
    lost = np.empty_like(values)
    encoded = encode(values, lost)
    assert encoded[2] == 0x1F
    np.testing.assert_array_equal(lost, values - decode(encoded, 3))
    assert abs(lost[0]) < 0.13 * LARGEST


def test_a_block_of_subnormal_scale_is_sent_as_zeros_and_lost() -> None:
    values = np.full(3, 1e-38, np.float32)
    lost = np.empty_like(values)
    assert encode(values, lost).tobytes() == bytes([0, 0, 0x88, 0x08])
    np.testing.assert_array_equal(lost, values)


def test_pieces_meet() -> None:
    values = np.random.default_rng(0).normal(size=2 * PIECE + 130).astype(np.float32)
    whole = decode(encode(values), values.size)
    parts = [values[:PIECE], values[PIECE : 2 * PIECE], values[2 * PIECE :]]
    np.testing.assert_array_equal(whole, np.concatenate([decode(encode(part.copy()), part.size) for part in parts]))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 4.3e37])
def test_scales_that_no_encoder_writes_are_refused_before_anything_is_written(scale: float) -> None:
    encoded = encode(np.ones(3000, np.float32))
    encoded[4:6] = np.array([scale], ml_dtypes.bfloat16).view(np.uint8)
    out = np.full(3000, 7.0, np.float32)
    for call in (CODEC.decode, CODEC.decode_add):
        with pytest.raises(ProtocolError, match=r"int4: expected scales in 0\.\."):
            call(encoded, out)
        np.testing.assert_array_equal(out, 7.0)


def test_something_after_the_last_value_is_refused() -> None:
    encoded = encode(np.ones(3, np.float32))
    encoded[-1] |= 0x10
    with pytest.raises(ProtocolError, match="int4: expected zeros after the last of 3 values"):
        decode(encoded, 3)


def test_the_level_that_no_encoder_writes_decodes_like_any_other() -> None:
    assert decode(np.array([0x80, 0x3F, 0x80], np.uint8), 2).tolist() == [-8.0, 0.0]


@given(
    arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
)
def test_any_finite_values_come_back_within_the_bound(values: Values) -> None:
    error = np.abs(decode(encode(values), values.size).astype(np.float64) - values).max(initial=0.0)
    assert error <= CODEC.error_bound(values)
