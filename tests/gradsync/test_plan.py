"""Buckets: every gradient once, backward order, limits kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.errors import UsageError
from asyncpar.gradsync import BucketPlan, GradientSpec, plan_buckets

MIB = 1 << 20


def spec(name: str, *shape: int, dtype: str = "float32") -> GradientSpec:
    return GradientSpec(name=name, shape=shape, dtype=np.dtype(dtype))


def names(plan: BucketPlan) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in plan.buckets]


def test_buckets_are_in_reverse_registration_order() -> None:
    plan = plan_buckets([spec("a", 10), spec("b", 10), spec("c", 10)], bucket_bytes=80, max_buckets=16)
    assert names(plan) == [["c", "b"], ["a"]]


def test_slots_follow_each_other_without_gaps() -> None:
    plan = plan_buckets([spec("a", 2, 3), spec("b", 5), spec("c")], bucket_bytes=MIB, max_buckets=16)
    (bucket,) = plan.buckets
    assert [(slot.name, slot.start, slot.stop) for slot in bucket.slots] == [("c", 0, 1), ("b", 1, 6), ("a", 6, 12)]
    assert (bucket.count, bucket.nbytes) == (12, 48)


def test_the_first_bucket_is_small() -> None:
    specs = [spec(f"p{i}", MIB // 8) for i in range(8)]  # half a MiB each
    plan = plan_buckets(specs, bucket_bytes=2 * MIB, max_buckets=16)
    assert [len(bucket.slots) for bucket in plan.buckets] == [2, 4, 2]


def test_an_oversize_gradient_stands_alone() -> None:
    plan = plan_buckets([spec("a", 5), spec("huge", 100), spec("c", 5)], bucket_bytes=80, max_buckets=16)
    assert names(plan) == [["c"], ["huge"], ["a"]]


def test_too_many_buckets_make_buckets_grow_and_drop_nothing() -> None:
    specs = [spec(f"p{i}", 10) for i in range(40)]
    plan = plan_buckets(specs, bucket_bytes=40, max_buckets=3)
    assert len(plan.buckets) <= 3
    assert sum(len(bucket.slots) for bucket in plan.buckets) == 40


def test_one_bucket_can_be_asked_for() -> None:
    specs = [spec(f"p{i}", MIB) for i in range(5)]
    assert len(plan_buckets(specs, bucket_bytes=MIB, max_buckets=1).buckets) == 1


def test_too_few_buckets_are_divided_as_far_as_they_can() -> None:
    specs = [spec("a", 10), spec("b", 10), spec("c", 30), spec("d", 10)]
    assert names(plan_buckets(specs, bucket_bytes=MIB, max_buckets=9, min_buckets=2)) == [["d", "c"], ["b", "a"]]
    assert names(plan_buckets(specs, bucket_bytes=MIB, max_buckets=9, min_buckets=3)) == [["d"], ["c"], ["b", "a"]]
    plan = plan_buckets(specs, bucket_bytes=MIB, max_buckets=9, min_buckets=9)
    assert names(plan) == [["d"], ["c"], ["b"], ["a"]]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2, 3]


def test_dtypes_do_not_share_buckets() -> None:
    specs = [spec("a", 4), spec("b", 4, dtype="float64"), spec("c", 4), spec("d", 4, dtype="float64")]
    plan = plan_buckets(specs, bucket_bytes=MIB, max_buckets=2)
    assert names(plan) == [["d", "b"], ["c", "a"]]


def test_fewer_buckets_than_dtypes_are_refused() -> None:
    with pytest.raises(
        UsageError, match="max_buckets: expected at least 2, one for each dtype, placement and tied tensor, got 1"
    ):
        plan_buckets([spec("a", 4), spec("b", 4, dtype="float64")], bucket_bytes=MIB, max_buckets=1)


def test_gradients_without_values_are_left_out() -> None:
    assert names(plan_buckets([spec("a", 0, 3), spec("b", 1)], bucket_bytes=MIB, max_buckets=1)) == [["b"]]


def test_no_gradients_make_no_buckets() -> None:
    assert plan_buckets([], bucket_bytes=MIB, max_buckets=1).buckets == ()


def test_two_gradients_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two are named 'a'"):
        plan_buckets([spec("a", 1), spec("a", 2)], bucket_bytes=MIB, max_buckets=1)


def test_integer_gradients_are_refused() -> None:
    with pytest.raises(UsageError, match="parameter a: expected a gradient of a floating dtype, got int32"):
        plan_buckets([spec("a", 1, dtype="int32")], bucket_bytes=MIB, max_buckets=1)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=60),
    bucket_bytes=st.integers(1, 400),
    max_buckets=st.integers(1, 20),
)
def test_every_gradient_is_in_exactly_one_bucket(sizes: list[int], bucket_bytes: int, max_buckets: int) -> None:
    specs = [spec(f"p{i}", size) for i, size in enumerate(sizes)]
    plan = plan_buckets(specs, bucket_bytes=bucket_bytes, max_buckets=max_buckets)
    placed = [slot for bucket in plan.buckets for slot in bucket.slots]
    backward = [(s.name, s.count) for s in reversed(specs) if s.count]
    assert [(slot.name, slot.stop - slot.start) for slot in placed] == backward
    assert len(plan.buckets) <= max_buckets
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))


@given(sizes=st.lists(st.integers(1, 50), max_size=60), bucket_bytes=st.integers(1, 400))
def test_a_bucket_of_several_gradients_keeps_its_limit(sizes: list[int], bucket_bytes: int) -> None:
    specs = [spec(f"p{i}", size) for i, size in enumerate(sizes)]
    plan = plan_buckets(specs, bucket_bytes=bucket_bytes, max_buckets=60)
    assert all(bucket.nbytes <= bucket_bytes for bucket in plan.buckets if len(bucket.slots) > 1)
