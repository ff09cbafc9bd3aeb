"""The wire layout of int8, and what it does at its edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncpar.codecs import Identity, Int8
from asyncpar.errors import ProtocolError

CODEC = Int8()


def encode(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    out = np.empty(CODEC.encoded_bytes(values.size), np.uint8)
    CODEC.encode(values, out)
    return out.tobytes()


def test_the_layout_is_scales_then_bytes() -> None:
    values = np.zeros(1026, np.float32)
    values[:3] = 127.0, -63.5, 1.0
    values[1024:] = -254.0, 2.0
    encoded = encode(values)
    assert encoded[:8] == np.array([1.0, 2.0], "<f4").tobytes()
    assert np.frombuffer(encoded[8:11], np.int8).tolist() == [127, -64, 1]
    assert np.frombuffer(encoded[8 + 1024 :], np.int8).tolist() == [-127, 1]
    assert len(encoded) == 8 + 1026


def test_a_large_bucket_shrinks_almost_four_times() -> None:
    count = 1 << 20
    assert 4 * count / CODEC.encoded_bytes(count) > 3.98


def test_each_block_has_its_own_scale() -> None:
    values = np.repeat(np.array([1e-6, 1e6], np.float32), 1024)
    decoded = np.empty_like(values)
    CODEC.decode(np.frombuffer(encode(values), np.uint8), decoded)
    np.testing.assert_allclose(decoded, values, rtol=1e-6)


def test_the_error_is_at_most_half_a_scale() -> None:
    values = np.random.default_rng(0).normal(size=1024).astype(np.float32)
    decoded = np.empty_like(values)
    CODEC.decode(np.frombuffer(encode(values), np.uint8), decoded)
    scale = np.abs(values).max() / 127
    assert np.abs(decoded - values).max() <= scale / 2 * (1 + 1e-5)


def test_the_worst_case_of_the_contraction_is_nearly_reached() -> None:
    values = np.full(1024, 0.4999 / 127, np.float32)
    values[0] = 1.0
    decoded = np.empty_like(values)
    CODEC.decode(np.frombuffer(encode(values), np.uint8), decoded)
    missing = np.square(decoded - values).sum() / np.square(values).sum()
    assert 0.99 * (1 - CODEC.contraction(1024)) < missing <= 1 - CODEC.contraction(1024)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, np.finfo(np.float32).max])
def test_scales_that_no_encoder_writes_are_refused_before_anything_is_written(scale: float) -> None:
    encoded = np.frombuffer(encode(np.ones(3000, np.float32)), np.uint8).copy()
    encoded[8:12] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    out = np.full(3000, 7.0, np.float32)
    with pytest.raises(ProtocolError, match=r"int8: expected scales in 0\.\."):
        CODEC.decode(encoded, out)
    np.testing.assert_array_equal(out, 7.0)


def test_the_identity_is_exact() -> None:
    values = np.random.default_rng(0).normal(size=77).astype(np.float32)
    out = np.empty(4 * 77, np.uint8)
    Identity().encode(values, out)
    assert out.tobytes() == values.astype("<f4").tobytes()


@given(
    arrays.arrays(np.float32, st.integers(0, 2100), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
)
def test_any_finite_values_come_back_within_the_bound(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> None:
    decoded = np.empty_like(values)
    CODEC.decode(np.frombuffer(encode(values), np.uint8), decoded)
    error = np.abs(decoded.astype(np.float64) - values).max(initial=0.0)
    assert error <= CODEC.error_bound(values)
