"""Owners of shards, and contents of buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.errors import UsageError
from asyncpar.zero.partition import Partition, Spec, make_partition, own_in_row, pack_own, pack_rows, unpack_rows
from tests.soak import chosen

SINGLE, HALF = np.dtype(np.float32), np.dtype(np.float16)

SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from([SINGLE, HALF])), min_size=1, max_size=6
)


def specs_of(shapes: list[tuple[list[int], np.dtype[Any]]]) -> list[Spec]:
    return [Spec(name=f"p{index}", shape=tuple(shape), dtype=dtype) for index, (shape, dtype) in enumerate(shapes)]


def vectors(*lengths: int) -> list[Spec]:
    return [Spec(name=f"p{index}", shape=(length,), dtype=SINGLE) for index, length in enumerate(lengths)]


def contents(partition: Partition) -> list[list[int]]:
    """Return which parameters the buckets hold."""
    return [list(bucket.parameters) for bucket in partition.buckets]


def test_eight_values_over_four_ranks_are_two_for_each() -> None:
    chunks = ceil_chunks(8, 4)
    assert [list(range(*chunk)) for chunk in chunks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_seven_values_over_three_ranks_are_three_three_and_one() -> None:
    assert [stop - start for start, stop in ceil_chunks(7, 3)] == [3, 3, 1]


def test_ranks_without_values_have_an_empty_range_at_the_end() -> None:
    assert ceil_chunks(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert ceil_chunks(0, 3) == [(0, 0)] * 3


@given(count=st.integers(0, 200), parts=st.integers(1, 40))
def test_every_value_has_one_owner(count: int, parts: int) -> None:
    owned = [value for start, stop in ceil_chunks(count, parts) for value in range(start, stop)]
    assert owned == list(range(count))


def test_an_impossible_number_of_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="parts: expected 1 or more, got 0"):
        ceil_chunks(4, 0)
    with pytest.raises(UsageError, match="size: expected 1 or more, got 0"):
        make_partition(vectors(4), 0)


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    partition = make_partition(vectors(8, 8, 8, 8), 2, bucket_bytes=64)
    assert contents(partition) == [[3, 2], [1, 0]]


def test_a_bucket_ends_before_it_is_too_large_and_a_large_parameter_is_alone() -> None:
    partition = make_partition(vectors(4, 100, 4, 4), 2, bucket_bytes=64)
    assert contents(partition) == [[3, 2], [1], [0]]


def test_a_parameter_of_too_many_values_is_cut() -> None:
    partition = make_partition(vectors(30, 4), 3, most_values=12)
    assert contents(partition) == [[1], [0], [0], [0]]
    assert [bucket.width for bucket in partition.buckets] == [2, 4, 4, 2]


def test_at_least_one_value_of_each_rank_travels_at_a_time() -> None:
    partition = make_partition(vectors(4), 4, most_values=1)
    assert [bucket.width for bucket in partition.buckets] == [1]


def test_dtypes_have_buckets_of_their_own_in_the_order_of_their_last_parameters() -> None:
    specs = specs_of([([4], SINGLE), ([4], HALF), ([4], SINGLE), ([4], HALF)])
    assert contents(make_partition(specs, 2)) == [[3, 1], [2, 0]]


@settings(max_examples=chosen(40, soak=100))
@given(shapes=SHAPES, size=st.integers(1, 5), bucket=st.integers(1, 200), most=st.integers(1, 60))
def test_buckets_hold_every_value_once_and_no_more_than_they_may(
    shapes: list[tuple[list[int], np.dtype[Any]]], size: int, bucket: int, most: int
) -> None:
    specs = specs_of(shapes)
    partition = make_partition(specs, size, bucket_bytes=bucket, most_values=most)
    seen = [np.zeros(spec.count, np.int64) for spec in specs]
    for each in partition.buckets:
        assert each.width * size <= max(most, size)
        assert partition.bucket_nbytes(each) <= bucket or len(set(each.parameters)) == 1
        for slot in each.slots:
            assert specs[slot.parameter].dtype == each.dtype
            for rank in range(size):
                start, stop = partition.range_of(slot, rank)
                seen[slot.parameter][start:stop] += 1
    assert all((counts == 1).all() for counts in seen)
    assert partition.padding < sum(size * spec.dtype.itemsize for spec in specs if spec.count) + 1
    for index in range(len(specs)):
        assert partition.buckets_of(index) == tuple(b.index for b in partition.buckets if index in b.parameters)


@settings(max_examples=chosen(40, soak=100))
@given(shapes=SHAPES, size=st.integers(1, 4), most=st.integers(1, 30))
def test_rows_are_what_owners_have(shapes: list[tuple[list[int], np.dtype[Any]]], size: int, most: int) -> None:
    specs = specs_of(shapes)
    partition = make_partition(specs, size, most_values=most)
    flats = [np.arange(1, spec.count + 1).astype(spec.dtype) for spec in specs]
    found = [np.zeros_like(flat) for flat in flats]
    for bucket in partition.buckets:
        rows = np.full((size, bucket.width), -1, bucket.dtype)
        by_owner = rows.copy()
        for slot in bucket.slots:
            pack_rows(partition, slot, flats[slot.parameter], rows)
            for rank in range(size):
                start, stop = partition.bounds(slot.parameter, rank)
                own = flats[slot.parameter][start:stop]
                pack_own(slot, own, by_owner[rank])
                part, seen = own_in_row(slot, rows[rank], stop - start)
                np.testing.assert_array_equal(own[part], seen)
            unpack_rows(partition, slot, rows, found[slot.parameter], ranks=range(size))
        np.testing.assert_array_equal(rows, by_owner)
        assert (rows >= 0).all()
    for flat, other in zip(flats, found, strict=True):
        np.testing.assert_array_equal(flat, other)


def test_a_missing_gradient_is_zeros() -> None:
    partition = make_partition(vectors(5), 2)
    rows = np.full((2, 3), 7, np.float32)
    pack_rows(partition, partition.buckets[0].slots[0], None, rows)
    assert not rows.any()
