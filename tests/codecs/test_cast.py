"""The wire layout of bf16 and fp16, and how they round."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Cast, Codec, Values
from asyncpar.codecs.codec import PIECE
from asyncpar.codecs.half import from_half, to_half
from asyncpar.errors import NonFiniteValue, ProtocolError, UsageError

BF16 = Cast("bfloat16")
FP16 = Cast("float16")
BOTH = pytest.mark.parametrize("codec", [BF16, FP16], ids=lambda codec: codec.name)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = arrays.arrays(np.float32, st.integers(0, 300), elements=FINITE)


def encode(codec: Codec, values: Values, lost: Values | None = None) -> Bytes:
    out = np.empty(codec.encoded_bytes(values.size), np.uint8)
    codec.encode(values, out, lost=lost)
    return out


def decode(codec: Codec, encoded: Bytes) -> Values:
    out = np.empty(encoded.size // 2, np.float32)
    codec.decode(encoded, out)
    return out


def words(codec: Codec, *values: float) -> list[int]:
    return [int(word) for word in encode(codec, np.array(values, np.float32)).view("<u2")]


def test_bf16_is_the_upper_half_of_float32_little_endian() -> None:
    assert encode(BF16, np.array([1.0, -2.5, 0.0, -0.0], np.float32)).tobytes() == bytes.fromhex("803f20c000000080")


def test_fp16_is_ieee_binary16_little_endian() -> None:
    assert encode(FP16, np.array([1.0, -2.5, 0.0, -0.0], np.float32)).tobytes() == bytes.fromhex("003c00c100000080")


def test_bf16_rounds_halfway_cases_to_even() -> None:
    step = 2.0**-7
    assert words(BF16, 1 + step / 2, 1 + 3 * step / 2, -1 - step / 2) == [0x3F80, 0x3F82, 0xBF80]
    above = float(np.nextafter(np.float32(1 + step / 2), np.float32(2)))
    assert words(BF16, above, -above) == [0x3F81, 0xBF81]


def test_fp16_rounds_halfway_cases_to_even() -> None:
    step = 2.0**-10
    assert words(FP16, 1 + step / 2, 1 + 3 * step / 2, -1 - step / 2) == [0x3C00, 0x3C02, 0xBC00]
    above = float(np.nextafter(np.float32(1 + step / 2), np.float32(2)))
    assert words(FP16, above, -above) == [0x3C01, 0xBC01]


def test_fp16_has_subnormals_down_to_the_last_bit() -> None:
    last = 2.0**-24
    assert words(FP16, last, -3 * last, 2.0**-14 - last, 2.0**-14) == [0x0001, 0x8003, 0x03FF, 0x0400]
    assert words(FP16, last / 2, 1.5 * last, -last / 2, 2.5 * last) == [0x0000, 0x0002, 0x8000, 0x0002]
    assert words(FP16, float(np.nextafter(np.float32(last / 2), np.float32(1))), 1e-45, -1e-45) == [1, 0, 0x8000]


def test_bf16_has_subnormals() -> None:
    assert words(BF16, 2.0**-133, -(2.0**-133), 1e-45) == [0x0001, 0x8001, 0x0000]


@pytest.mark.parametrize(
    ("codec", "values", "largest", "bits"),
    [
        (BF16, [3.4028234e38, -3.4028234e38, 3.3961775e38], 3.3895313892515355e38, 0x7F7F),
        (FP16, [65520.0, -1e5, 3.4028234e38], 65504.0, 0x7BFF),
    ],
    ids=["bf16", "fp16"],
)
def test_values_beyond_the_range_become_the_largest_finite_value_and_the_rest_is_lost(
    codec: Codec, values: list[float], largest: float, bits: int
) -> None:
    x = np.array([*values, 1.0], np.float32)
    lost = np.empty_like(x)
    encoded = encode(codec, x, lost)
    assert encoded.view("<u2").tolist()[:3] == [bits, bits | 0x8000, bits]
    np.testing.assert_array_equal(decode(codec, encoded), np.array([largest, -largest, largest, 1.0], np.float32))
    np.testing.assert_array_equal(lost, x - decode(codec, encoded))


def test_the_greatest_value_that_rounds_down_is_no_overflow() -> None:
    assert words(FP16, float(np.nextafter(np.float32(65520), np.float32(0)))) == [0x7BFF]
    assert words(BF16, float(np.float32(3.3895314e38))) == [0x7F7F]


def test_every_binary16_comes_back_as_it_was() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    out = np.empty(bits.size, np.float32)
    from_half(bits, out)
    np.testing.assert_array_equal(out.view(np.uint32), bits.view(np.float16).astype(np.float32).view(np.uint32))
    assert encode(FP16, out).tobytes() == bits.astype("<u2").tobytes()


def test_binary16_is_numpys_between_any_two_neighbours() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[1:] + halves[:-1]) / 2
    around = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    values = np.concatenate([*around, *(-part for part in around)])
    assert encode(FP16, values).tobytes() == values.astype("<f2").tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_binary16_is_numpys_for_bits_at_random(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 50_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.abs(values) < 65520]
    assert encode(FP16, values).tobytes() == values.astype("<f2").tobytes()


@BOTH
@given(values=VECTORS)
def test_any_finite_values_come_back_within_the_bound(codec: Codec, values: Values) -> None:
    decoded = decode(codec, encode(codec, values))
    assert np.abs(decoded.astype(np.float64) - values).max(initial=0.0) <= codec.error_bound(values)


@given(values=VECTORS)
def test_bf16_is_that_of_ml_dtypes(values: Values) -> None:
    expected = values.astype(ml_dtypes.bfloat16)
    finite = np.isfinite(expected)
    assert encode(BF16, values).view("<u2")[finite].tolist() == expected.view(np.uint16)[finite].tolist()


@BOTH
def test_pieces_meet(codec: Codec) -> None:
    values = np.random.default_rng(0).normal(size=PIECE + 3).astype(np.float32)
    values[-1] = 3e38
    assert codec.sum_dtype is not None
    with np.errstate(over="ignore"):
        expected = values.astype(codec.sum_dtype).view(np.uint16)
    expected[-1] = encode(codec, values[-1:]).view(np.uint16)[0]
    np.testing.assert_array_equal(encode(codec, values).view(np.uint16), expected)


@BOTH
@pytest.mark.parametrize("bits", ["infinity", "minus infinity", "NaN", "negative NaN"])
def test_what_is_not_finite_is_refused_before_anything_is_written(codec: Codec, bits: str) -> None:
    infinity = {"bf16": 0x7F80, "fp16": 0x7C00}[codec.name]
    word = {"infinity": 0, "minus infinity": 0x8000, "NaN": 1, "negative NaN": 0x8001}[bits] | infinity
    encoded = encode(codec, np.ones(3000, np.float32))
    encoded.view("<u2")[-1] = word
    out = np.full(3000, 7.0, np.float32)
    for call in (codec.decode, codec.decode_add):
        with pytest.raises(ProtocolError, match=rf"{codec.name}: expected finite numbers, got NaN or infinity"):
            call(encoded, out)
        np.testing.assert_array_equal(out, 7.0)


@BOTH
def test_nan_beside_a_value_that_is_clipped_is_refused(codec: Codec) -> None:
    with pytest.raises(NonFiniteValue):
        encode(codec, np.array([3.4e38, np.nan], np.float32))


def test_other_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="dtype: expected one of bfloat16, float16, got 'float8'"):
        Cast("float8")


def test_a_processor_without_subnormals_converts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1.0, -3e-6, 1e-7, 60000.0], np.float32)
    results: list[tuple[bytes, list[float]]] = []
    for has_subnormals in (True, False):
        monkeypatch.setattr("asyncpar.codecs.half._has_subnormals", lambda has=has_subnormals: has)
        written: NDArray[np.uint16] = np.empty(4, np.uint16)
        to_half(values, written, np.empty((3, 4), np.float32))
        back = np.empty(4, np.float32)
        from_half(written, back)
        results.append((written.tobytes(), back.tolist()))
    assert results[0] == results[1]
