"""Conformance of codecs, second half: decoding, adding and summing, and bytes that were not encoded by the codec."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from asyncpar.codecs import Bytes, Codec
from asyncpar.errors import ProtocolError
from asyncpar.testing.codec_samples import CodecSuite, decoded, draw, empty, encoded, expect, round_trip, samples

_HOSTILE_COUNT = 3000
_FLIPS = 200


class CodecDecoding(CodecSuite):
    """Equal bytes give equal values, encoded forms add up, and invalid bytes are refused or decoded without harm."""

    def test_equal_bytes_decode_to_equal_values_wherever_they_lie(self) -> None:
        codec = self.make()
        form = encoded(codec, draw(5000))
        shifted = np.empty(form.size + 1, np.uint8)[1:]
        shifted[:] = form
        np.testing.assert_array_equal(decoded(codec, shifted, 5000), decoded(codec, form, 5000))
        shifted.flags.writeable = False
        np.testing.assert_array_equal(decoded(codec, shifted, 5000), decoded(codec, form, 5000))

    def test_encoding_does_not_depend_on_where_its_bytes_go(self) -> None:
        codec = self.make()
        values = draw(5000)
        form = encoded(codec, values)
        shifted = np.empty(form.size + 1, np.uint8)[1:]
        codec.encode(values, shifted)
        np.testing.assert_array_equal(shifted, form)

    def test_decode_add_is_decode_and_then_add(self) -> None:
        codec = self.make()
        for values in samples():
            form = encoded(codec, values)
            for other in (values[::-1].copy(), np.zeros_like(values)):
                with np.errstate(over="ignore"):
                    expected = other + decoded(codec, form, values.size)
                codec.decode_add(form, other)
                np.testing.assert_array_equal(other, expected)

    def test_a_wrong_length_is_a_protocol_error_and_touches_nothing(self) -> None:
        codec = self.make()
        form = encoded(codec, draw(5000))
        for size in (0, 1, form.size - 1, form.size + 1):
            out = np.full(5000, 7.0, np.float32)
            wrong = np.resize(form, size)
            for decode in (codec.decode, codec.decode_add):
                expect(ProtocolError, lambda decode=decode, wrong=wrong, out=out: decode(wrong, out))  # type: ignore[misc]
                np.testing.assert_array_equal(out, 7.0)

    def test_hostile_bytes_decode_to_finite_values_or_a_protocol_error_that_touches_nothing(self) -> None:
        codec = self.make()
        for form in _hostile(codec):
            out, total = np.full((2, _HOSTILE_COUNT), 7.0, np.float32)
            try:
                codec.decode(form, out)
            except ProtocolError:
                np.testing.assert_array_equal(out, 7.0)
                expect(ProtocolError, lambda form=form, total=total: codec.decode_add(form, total))  # type: ignore[misc]
                np.testing.assert_array_equal(total, 7.0)
            else:
                assert np.isfinite(out).all()
                codec.decode_add(form, total)
                np.testing.assert_array_equal(total, out + np.float32(7.0))

    def test_a_summable_codec_may_be_summed_in_encoded_form(self) -> None:
        codec = self.make()
        one, other = draw(5000), draw(5000)[::-1].copy()
        dtype = codec.sum_dtype
        assert codec.is_summable == (dtype is not None)
        if dtype is None:
            assert codec.encoded_bytes(one.size) < one.nbytes, "a codec that is neither summable nor smaller is no use"
            return
        total = encoded(codec, one).view(dtype) + encoded(codec, other).view(dtype)
        assert total.dtype == dtype
        expected = round_trip(codec, one).astype(np.float64) + round_trip(codec, other)
        limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        bound = float(limits.eps) * np.abs(expected) + float(limits.tiny)
        assert (np.abs(decoded(codec, total.view(np.uint8), one.size) - expected) <= bound).all()

    def test_an_encoded_sum_that_is_not_finite_is_a_protocol_error_and_touches_nothing(self) -> None:
        codec = self.make()
        if codec.sum_dtype is None:
            return
        form = encoded(codec, np.full(5000, np.finfo(np.float32).max))
        for bad in (np.nan, np.inf, -np.inf):
            wrong, out = form.copy(), np.full(5000, 7.0, np.float32)
            wrong.view(codec.sum_dtype)[-1] = bad
            for decode in (codec.decode, codec.decode_add):
                expect(ProtocolError, lambda decode=decode, wrong=wrong, out=out: decode(wrong, out))  # type: ignore[misc]
                np.testing.assert_array_equal(out, 7.0)


def _hostile(codec: Codec) -> Iterator[Bytes]:
    """Yield noise, constant bytes, and an encoded form that is wrong in one place."""
    rng = np.random.default_rng(11)
    size = codec.encoded_bytes(_HOSTILE_COUNT)
    for _ in range(50):
        yield rng.integers(0, 256, size, dtype=np.uint8)
    for byte in (0x00, 0x01, 0x7F, 0x80, 0xFF):
        yield np.full_like(empty(codec, _HOSTILE_COUNT), byte)
    form = encoded(codec, draw(_HOSTILE_COUNT))
    for place in np.linspace(0, size - 1, _FLIPS).astype(int):
        for byte in (0x00, 0x7F, 0x80, 0xFF):
            wrong = form.copy()
            wrong[place] = byte
            yield wrong
