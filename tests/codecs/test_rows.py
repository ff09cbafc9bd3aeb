"""Rows of encoded values, and sums of vectors by owners, done by hand for several ranks."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.codecs import Codec, parse_codec
from asyncpar.codecs.rows import RowFormat, ShardedSum, are_finite
from asyncpar.errors import ProtocolError

COUNT, SIZE = 1001, 3
CODECS = ["int8", "int4", "sign", "bf16", "topk:0.5"]


def codec_of(name: str) -> Codec:
    codec = parse_codec(name)
    assert isinstance(codec, Codec)
    return codec


def add_up(vectors: list[np.ndarray], codec: Codec, *, is_mean: bool = False) -> tuple[list[np.ndarray], list[bool]]:
    """Return the decoded sum of each rank, and whether it is finite."""
    sums = [ShardedSum(codec, COUNT, rank=rank, size=SIZE) for rank in range(SIZE)]
    for one, vector in zip(sums, vectors, strict=True):
        one.encode(np.pad(vector, (0, one.padded_count - COUNT)))
    sent = [one.outgoing.copy() for one in sums]
    for rank, one in enumerate(sums):
        one.incoming[:] = np.stack([rows[rank] for rows in sent])
        one.sum_owned(what="test", is_mean=is_mean)
    owned = np.stack([one.owned for one in sums])
    results, finite = [], []
    for one in sums:
        one.incoming[:] = owned
        out = np.zeros(one.padded_count, np.float32)
        finite.append(one.decode(out, what="test"))
        results.append(out[:COUNT])
    return results, finite


def draw() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(COUNT).astype(np.float32) for _ in range(SIZE)]


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_all_ranks_hold_the_same_bits(name: str, is_mean: bool) -> None:
    results, finite = add_up(draw(), codec_of(name), is_mean=is_mean)
    assert finite == [True] * SIZE
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("is_mean", [False, True])
def test_the_result_is_the_sum_or_the_mean(is_mean: bool) -> None:
    vectors = draw()
    results, _ = add_up(vectors, codec_of("int8"), is_mean=is_mean)
    np.testing.assert_allclose(results[0], sum(vectors) / (SIZE if is_mean else 1), atol=0.2)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_values_that_are_not_finite_are_known_to_all_ranks(value: float) -> None:
    """Also a sum of finite values that overflows."""
    vectors = draw()
    for vector in vectors if np.isfinite(value) else vectors[1:2]:
        vector[7] = value
    _, finite = add_up(vectors, codec_of("int8"))
    assert finite == [False] * SIZE


def test_a_row_that_cannot_be_decoded_names_its_sender() -> None:
    form = RowFormat(codec_of("int8"), 10)
    rows = np.zeros((2, form.nbytes), np.uint8)
    assert form.encode(np.ones(10, np.float32), rows[1])
    assert are_finite(rows)
    rows[1, 4:] = 0xFF
    with pytest.raises(ProtocolError, match="gradients: what rank 1 sent cannot be decoded"):
        form.decode(rows, 1, np.zeros(10, np.float32), adds=False, what="gradients")
