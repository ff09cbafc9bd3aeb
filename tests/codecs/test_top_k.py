"""The wire layout of top-k, which values it takes, and what it refuses."""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncpar.codecs import Bytes, Codec, Identity, Int8, RandomK, TopK, Values
from asyncpar.codecs.draw import draw_positions
from asyncpar.errors import ProtocolError, UsageError
from tests.soak import chosen

LAYOUT = np.array([0.0, 5.0, -3.0, 1.0, -3.0, 0.0, 0.5, 0.0, 0.0, 0.0], np.float32)


def encode(codec: Codec, values: Values) -> Bytes:
    out = np.full(codec.encoded_bytes(values.size), 255, np.uint8)
    codec.encode(values, out)
    return out


def round_trip(codec: Codec, values: Values) -> Values:
    out = np.full(values.size, np.nan, np.float32)
    codec.decode(encode(codec, values), out)
    return out


def expected_top(values: Values, count: int) -> Values:
    """The slow way: a stable sort."""
    kept = np.argsort(-np.abs(values), kind="stable")[:count]
    expected = np.zeros_like(values)
    expected[kept] = values[kept]
    return expected


def test_the_layout_is_counts_then_offsets_then_values() -> None:
    assert encode(TopK(0.3), LAYOUT).tobytes() == (
        b"\x03\0\0\0" + b"\x01\0\x02\0\x04\0" + b"\0\0" + np.array([5.0, -3.0, -3.0], "<f4").tobytes()
    )


def test_values_may_be_encoded_by_another_codec() -> None:
    encoded = encode(TopK(0.12, Int8()), np.append(np.repeat(LAYOUT, 3), np.zeros(70, np.float32)))
    assert encoded[:4].tobytes() == b"\x0c\0\0\0"
    assert encoded[4 : 4 + 24].view("<u2").tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    expected = np.empty(Int8().encoded_bytes(12), np.uint8)
    Int8().encode(np.repeat(np.array([5, -3, 1, -3], np.float32), 3), expected)
    assert encoded[28:].tobytes() == expected.tobytes()


def test_blocks_are_counted_apart_and_unused_room_is_zeros() -> None:
    values = np.zeros(200_000, np.float32)
    values[[65_535, 65_536, 131_072, 199_999]] = 1.0, 2.0, 3.0, 4.0
    encoded = encode(TopK(0.0001), values)
    assert encoded[:16].view("<u4").tolist() == [1, 1, 1, 1]
    assert encoded[16 : 16 + 40].view("<u2").tolist() == [65_535, 0, 0, 199_999 - 3 * 65_536] + [0] * 16
    assert encoded[56:].view("<f4").tolist() == [1.0, 2.0, 3.0, 4.0] + [0.0] * 16


def test_the_encoded_size_is_six_bytes_for_an_entry_and_three_with_int8() -> None:
    count = 1 << 22
    assert TopK(0.01).encoded_bytes(count) / (0.01 * count) < 6.01
    assert TopK(0.01, Int8()).encoded_bytes(count) / (0.01 * count) < 3.02


def test_where_indices_would_cost_more_than_they_save_all_values_are_sent() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for codec, dense in ((TopK(0.7), Identity()), (TopK(1.0, Int8()), Int8()), (TopK(0.4, Int8()), Int8())):
        assert codec.encoded_bytes(1000) == dense.encoded_bytes(1000)
        np.testing.assert_array_equal(encode(codec, values), encode(dense, values))
        assert codec.contraction(1000) == dense.contraction(1000)


def test_one_value_is_sent_as_it_is() -> None:
    one = np.array([-7.5], np.float32)
    assert TopK(1e-6).encoded_bytes(1) == 4
    np.testing.assert_array_equal(round_trip(TopK(1e-6), one), one)


@pytest.mark.parametrize("ratio", [1e-9, 1e-4, 0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("count", [20, 100, 16_384, 16_385, 65_536, 300_001])
def test_exactly_the_largest_are_kept(ratio: float, count: int) -> None:
    values = np.random.default_rng(count).standard_t(2.0, count).astype(np.float32)
    np.testing.assert_array_equal(round_trip(TopK(ratio), values), expected_top(values, ceil(ratio * count)))


@cache
def _adversaries(count: int) -> dict[str, Values]:
    rng = np.random.default_rng(3)
    noise = rng.normal(0.0, 1e-3, count).astype(np.float32)
    in_one_place, in_the_last_place, strided = noise.copy(), noise.copy(), noise.copy()
    in_one_place[1000:4000] = 1.0
    in_the_last_place[-3000:] = rng.normal(size=3000)
    strided[:: count // 2000] += 5.0
    return {
        "zeros": np.zeros(count, np.float32),
        "all equal": np.full(count, -2.5, np.float32),
        "two values": np.where(noise > 0, np.float32(1.0), np.float32(-1.0)),
        "almost all zeros": np.where(np.arange(count) % 1000 == 7, noise, np.float32(0.0)),
        "few levels": np.round(noise * 2000.0),
        "in one place": in_one_place,
        "in the last place": in_the_last_place,
        "strided": strided,
        "growing": np.arange(count, dtype=np.float32),
        "heavy tail": rng.standard_cauchy(count).astype(np.float32) ** 3,
        "subnormal": np.abs(noise) * np.float32(1e-38),
        "extreme": np.where(noise > 0, np.finfo(np.float32).max, noise),
    }


@pytest.mark.parametrize("kind", _adversaries(6000))
@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.3])
def test_no_distribution_misleads_the_sampled_threshold(kind: str, ratio: float) -> None:
    values = _adversaries(150_000)[kind]
    np.testing.assert_array_equal(round_trip(TopK(ratio), values), expected_top(values, ceil(ratio * values.size)))


@pytest.mark.parametrize("kind", ["all equal", "in one place", "heavy tail"])
def test_a_misled_threshold_does_not_spoil_what_is_lost(kind: str) -> None:
    values = _adversaries(150_000)[kind]
    residual = np.roll(values, 1) * np.float32(0.25)
    corrected = values + residual
    lost, out = residual.copy(), np.empty(TopK(0.01).encoded_bytes(values.size), np.uint8)
    TopK(0.01).encode(values, out, residual=lost, lost=lost)
    sent = np.empty_like(values)
    TopK(0.01).decode(out, sent)
    np.testing.assert_array_equal(sent, expected_top(corrected, 1500))
    np.testing.assert_array_equal(lost, corrected - sent)


def test_values_that_hit_the_sample_mislead_nobody() -> None:
    """What the threshold is estimated from is known, so let exactly that be large."""
    size = chosen(1 << 18, soak=1 << 20)
    values = np.random.default_rng(0).normal(size=size).astype(np.float32)
    sampled = draw_positions(size // 64, size, key=0)
    for scale in (np.float32(100.0), np.float32(0.0), np.float32(1e-6)):
        skewed = values.copy()
        skewed[sampled] *= scale
        np.testing.assert_array_equal(round_trip(TopK(0.001), skewed), expected_top(skewed, ceil(0.001 * size)))


def test_a_zero_is_never_sent() -> None:
    values = np.zeros(100_000, np.float32)
    values[12_345] = -1e-40
    encoded = encode(TopK(0.01), values)
    assert encoded[:8].view("<u4").tolist() == [1, 0]
    np.testing.assert_array_equal(round_trip(TopK(0.01), values), values)


def test_adding_touches_nothing_but_the_entries() -> None:
    out = np.full(10, np.nan, np.float32)
    out[[1, 2, 4]] = 1.0
    TopK(0.3).decode_add(encode(TopK(0.3), LAYOUT), out)
    np.testing.assert_array_equal(out, [np.nan, 6.0, -2.0, np.nan, -2.0] + [np.nan] * 5)


@pytest.mark.parametrize(
    ("counts", "offsets", "message"),
    [
        ([4], [1, 2, 4], "expected at most 3 entries, got 4"),
        ([2**32 - 1], [1, 2, 4], "expected at most 3 entries, got 4294967295"),
        ([3], [1, 4, 2], "expected ascending positions below 10"),
        ([3], [1, 1, 2], "expected ascending positions below 10"),
        ([3], [1, 2, 10], "expected ascending positions below 10"),
        ([1], [65_535, 0, 0], "expected ascending positions below 10"),
    ],
)
def test_positions_that_no_encoder_writes_are_refused_before_anything_is_written(
    counts: list[int], offsets: list[int], message: str
) -> None:
    encoded = encode(TopK(0.3), LAYOUT)
    encoded[:4].view("<u4")[:] = counts
    encoded[4:10].view("<u2")[:] = offsets
    out = np.full(10, 7.0, np.float32)
    for decode in (TopK(0.3).decode, TopK(0.3).decode_add):
        with pytest.raises(ProtocolError, match=rf"topk:0\.3: {message}"):
            decode(encoded, out)
        np.testing.assert_array_equal(out, 7.0)


@given(st.binary(min_size=TopK(0.05, Int8()).encoded_bytes(500), max_size=TopK(0.05, Int8()).encoded_bytes(500)))
def test_hostile_bytes_are_refused_or_give_finite_values(form: bytes) -> None:
    codec, out = TopK(0.05, Int8()), np.full(500, 7.0, np.float32)
    try:
        codec.decode(np.frombuffer(form, np.uint8), out)
    except ProtocolError:
        np.testing.assert_array_equal(out, 7.0)
    else:
        assert np.isfinite(out).all()
        assert np.count_nonzero(out) <= 25


@given(
    arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from([0.01, 0.1, 0.5]),
)
def test_any_finite_values_lose_but_their_smallest(values: Values, ratio: float) -> None:
    codec = TopK(ratio)
    decoded = round_trip(codec, values)
    if codec.encoded_bytes(values.size) < values.nbytes:
        np.testing.assert_array_equal(decoded, expected_top(values, ceil(ratio * values.size)))
    else:
        np.testing.assert_array_equal(decoded, values)


def test_the_share_is_meant_in_decimal() -> None:
    assert 0.07 * 100 > 7
    assert encode(TopK(0.07), np.ones(100, np.float32))[:4].view("<u4").tolist() == [7]


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_ratios_out_of_range_are_refused(ratio: float) -> None:
    for make in (TopK, RandomK):
        with pytest.raises(UsageError, match="ratio: expected a number with 0 < ratio <= 1, got"):
            make(ratio)


def test_the_place_reaches_the_codec_of_the_values() -> None:
    codec = TopK(0.5, RandomK(0.2, values=Int8()))
    assert codec.at(1, 2) == codec.at(1, 2) != codec.at(1, 3)
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert encode(codec.at(1, 2), values).tobytes() != encode(codec.at(1, 3), values).tobytes()
