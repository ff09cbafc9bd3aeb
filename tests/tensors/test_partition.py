"""Ceil chunks: who has which part of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.errors import UsageError
from asyncpar.tensors import TensorPartition
from tests.tensors.worlds import shapes_and_dims


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    partitions = [TensorPartition.of((length,), 0, parts, rank) for rank in range(parts)]
    return [(partition.start_idx, partition.end_idx) for partition in partitions]


@pytest.mark.parametrize(
    ("length", "parts", "expected"),
    [
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_parts_are_ceil_chunks_and_none_begins_past_the_end(
    length: int, parts: int, expected: list[tuple[int, int]]
) -> None:
    assert bounds(length, parts) == expected


@given(st.integers(0, 200), st.integers(1, 40))
def test_every_place_is_in_exactly_one_part(length: int, parts: int) -> None:
    reached = 0
    for start, end in bounds(length, parts):
        assert 0 <= start <= end <= length
        assert start == reached
        reached = end
    assert reached == length


def test_a_quarter_of_512_columns_is_the_contracts() -> None:
    partition = TensorPartition.of((128, 512), 0, 4, 0)
    assert (partition.start_idx, partition.end_idx, partition.length) == (0, 32, 32)
    assert partition.slice_of((128, 512)).local_shape == (32, 512)
    assert not partition.is_empty


@given(shapes_and_dims(), st.integers(1, 6))
def test_the_parts_put_together_are_the_whole(case: tuple[tuple[int, ...], int], parts: int) -> None:
    shape, dim = case
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    again = np.full(shape, -1)
    for rank in range(parts):
        part = TensorPartition.of(shape, dim, parts, rank).slice_of(shape)
        part.put(part.cut(whole), again)
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize("dim", [-1, 2, 3])
def test_a_dimension_that_the_tensor_does_not_have_is_an_error(dim: int) -> None:
    message = rf"^Split dimension {dim} out of bounds for tensor with 2 dimensions$"
    with pytest.raises(UsageError, match=message):
        TensorPartition.of((4, 4), dim, 2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_partitions": 0}, "num_partitions: expected at least 1, got 0"),
        ({"partition_rank": 4}, r"partition_rank: expected 0\.\.3, got 4"),
        ({"partition_rank": -1}, r"partition_rank: expected 0\.\.3, got -1"),
        ({"split_dim": -1}, "split_dim: expected 0 or more, got -1"),
        ({"start_idx": 3}, r"expected a range from 0 or more, got 3\.\.2"),
        ({"end_idx": "2"}, "end_idx: expected an integer, got '2'"),
    ],
)
def test_a_partition_that_makes_no_sense_is_an_error(changes: dict[str, Any], message: str) -> None:
    good = {"split_dim": 0, "start_idx": 0, "end_idx": 2, "num_partitions": 4, "partition_rank": 0}
    with pytest.raises(UsageError, match=message):
        TensorPartition(**{**good, **changes})


def test_a_partition_that_ends_past_the_tensor_has_no_slice() -> None:
    partition = TensorPartition(split_dim=1, start_idx=2, end_idx=6, num_partitions=2, partition_rank=1)
    with pytest.raises(UsageError, match="end_idx: expected at most 5, the length of dimension 1, got 6"):
        partition.slice_of((3, 5))


def test_the_only_partition_is_the_whole() -> None:
    partition = TensorPartition(split_dim=0, start_idx=0, end_idx=2, num_partitions=1, partition_rank=0)
    assert partition.is_whole
    with pytest.raises(UsageError, match=r"expected 0\.\.3 of the only partition"):
        partition.slice_of((3,))
