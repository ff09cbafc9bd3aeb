"""A value that was taken apart and put together again is the same, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncpar.pipeline.offload.packing import take_apart
from tests.soak import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: Any
    label: str = "label"


@dataclass
class Open:
    x: Any
    hidden: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.hidden = "made"


class Pair(NamedTuple):
    one: Any
    other: Any


def again(value: object) -> Any:
    skeleton, blocks = take_apart(value)
    return skeleton.fill([block.copy() for block in blocks])


def same_bits(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
        np.arange(24.0)[::-2],
        np.arange(24.0).reshape(4, 6)[1:3, ::3],
        np.zeros((0, 3)),
        np.array(3.5),
        np.broadcast_to(np.arange(3.0), (4, 3)),
        np.array([np.nan, -0.0, np.inf, 5e-324]),
        np.frombuffer(b"\x01\x00\xc0\x7f\x01\x00\xc0\xff", np.float32),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.array([True, False]),
        np.arange(4).astype(">i2"),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["text", "more"]),
        np.empty_like(np.zeros((3, 4, 5)).transpose(2, 0, 1)),
    ],
)
def test_an_array_of_any_kind_comes_back(array: Any) -> None:
    back = again([array])[0]
    same_bits(back, array)
    assert back.strides == array.strides or not array.size
    assert back.flags.writeable == array.flags.writeable


@settings(max_examples=chosen(40, soak=100))
@given(hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_side=0)))
def test_an_array_of_any_dtype_and_shape_comes_back(array: Any) -> None:
    same_bits(again({"array": array})["array"], array)


ARRAYS = st.integers(0, 5).map(lambda size: np.arange(float(size)))
VALUES = st.recursive(
    st.one_of(ARRAYS, st.integers(), st.text(max_size=3), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(lambda x: Frozen(x=x)),
        inner.map(Open),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=8,
)


def check_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        same_bits(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            check_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, Frozen):
        check_same((one.x, one.label), (other.x, other.label))
    elif isinstance(one, Open):
        check_same((one.x, one.hidden), (other.x, other.hidden))
    else:
        assert one == other


@settings(max_examples=chosen(30, soak=100))
@given(VALUES)
def test_any_nesting_comes_back(value: Any) -> None:
    check_same(again(value), value)


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    skeleton, blocks = take_apart([whole, whole[1], {"t": whole.T}])
    assert skeleton.nbytes == whole.nbytes
    one, row, rest = skeleton.fill([block.copy() for block in blocks])
    one[1, 2] = -7.0
    assert row[2] == -7.0
    assert rest["t"][2, 1] == -7.0
    assert whole[1, 2] == 6.0


def test_one_array_in_two_places_stays_one_object() -> None:
    array = np.arange(3.0)
    one, other = again((array, [array]))
    assert one is other[0]


def test_the_value_itself_is_left_alone() -> None:
    array = np.arange(3.0)
    value = {"list": [array], "saved": Frozen(x=array)}
    take_apart(value)
    assert value["list"][0] is array  # type: ignore[index]
    assert value["saved"].x is array  # type: ignore[attr-defined]


def test_kinds_of_dicts_and_lists_are_kept() -> None:
    value = OrderedDict(b=np.zeros(1), a=1)
    back = again(value)
    assert type(back) is OrderedDict
    assert list(back) == ["b", "a"]


def test_what_is_no_array_stays_the_same_object() -> None:
    thing = object()
    objects = np.array([thing], dtype=object)
    frozen = Frozen(x=thing)
    back = again([thing, frozen, objects, np.zeros(2)])
    assert back[0] is thing
    assert back[1] is frozen
    assert back[2] is objects


def test_a_container_that_contains_itself_is_no_hang() -> None:
    value: list[Any] = [np.zeros(2)]
    value.append(value)
    back = again(value)
    np.testing.assert_array_equal(back[0], np.zeros(2))
