"""Random-k draws the same places on all ranks, and writes their values."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.codecs import Bytes, Codec, Int8, RandomK, TopK, Values
from asyncpar.errors import ProtocolError, UsageError


def encode(codec: Codec, values: Values) -> Bytes:
    out = np.full(codec.encoded_bytes(values.size), 255, np.uint8)
    codec.encode(values, out)
    return out


def positions(codec: Codec, count: int) -> list[int]:
    """Return what was taken, in the order in which it is sent."""
    return [int(value) for value in encode(codec, np.arange(count, dtype=np.float32)).view("<f4")]


def test_draws_are_the_same_everywhere() -> None:
    """Ranks of different versions must agree: these numbers are part of the format."""
    assert positions(RandomK(0.3), 10) == [7, 1, 2]
    assert positions(RandomK(0.3, 7).at(3, 5), 10) == [8, 0, 4]


def test_all_positions_are_equally_likely() -> None:
    codec, draws = RandomK(0.3), 5_000
    hits = np.bincount([place for step in range(draws) for place in positions(codec.at(step), 10)], minlength=10)
    assert np.abs(hits / draws - 0.3).max() < 5 * np.sqrt(0.21 / draws)


def test_sums_of_encoded_forms_are_sums() -> None:
    one, other = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    codec = RandomK(0.1).at(4, 2)
    assert codec.sum_dtype is not None
    total = encode(codec, one).view(codec.sum_dtype) + encode(codec, other).view(codec.sum_dtype)
    decoded = np.empty(1000, np.float32)
    codec.decode(total.view(np.uint8), decoded)
    assert np.count_nonzero(decoded) == 100
    np.testing.assert_array_equal(decoded[decoded != 0], (one + other)[decoded != 0])


def test_it_is_summable_as_its_values_are() -> None:
    assert RandomK(0.1).sum_dtype == np.float32
    assert not RandomK(0.1, values=Int8()).is_summable
    assert not RandomK(0.1, values=TopK(0.1)).is_summable


def test_a_ratio_of_one_sends_all_values() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    decoded = np.empty_like(values)
    RandomK(1.0).decode(encode(RandomK(1.0), values), decoded)
    np.testing.assert_array_equal(decoded, values)
    assert sorted(positions(RandomK(1.0), 10)) == list(range(10))


def test_in_time_error_feedback_sends_everything() -> None:
    values = np.random.default_rng(0).normal(size=500).astype(np.float32)
    codec, residual, sent = RandomK(0.1, values=Int8()), np.zeros_like(values), np.zeros(500)
    steps = 300
    for step in range(steps):
        here = codec.at(step)
        out, decoded = np.empty(here.encoded_bytes(500), np.uint8), np.empty(500, np.float32)
        here.encode(values, out, residual=residual, lost=residual)
        here.decode(out, decoded)
        sent += decoded
    np.testing.assert_allclose(sent + residual, steps * values, rtol=1e-3, atol=1e-3)
    assert np.linalg.norm(residual) < 25 * np.linalg.norm(values)


def test_a_random_k_of_a_random_k_draws_twice() -> None:
    nested = RandomK(0.5, values=RandomK(0.5))
    taken = {tuple(positions(nested.at(step), 20)) for step in range(50)}
    assert len(taken) > 40
    assert all(len(set(some)) == 5 for some in taken)


def test_encoded_values_that_are_not_finite_are_refused_before_anything_is_written() -> None:
    encoded = encode(RandomK(0.1), np.ones(100, np.float32))
    encoded.view("<f4")[3] = np.inf
    out = np.full(100, 7.0, np.float32)
    for decode in (RandomK(0.1).decode, RandomK(0.1).decode_add):
        with pytest.raises(ProtocolError):
            decode(encoded, out)
        np.testing.assert_array_equal(out, 7.0)


@pytest.mark.parametrize("seed", [0.5, "1", True])
def test_a_seed_is_an_integer(seed: object) -> None:
    with pytest.raises(UsageError, match="seed: expected an integer, got"):
        RandomK(0.1, seed)  # type: ignore[arg-type]
