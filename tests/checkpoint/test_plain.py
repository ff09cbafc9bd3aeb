"""Values that JSON keeps exactly are saved; others are refused."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.checkpoint.plain import decode_plain, encode_plain, first_difference, plain, plain_dict
from asyncpar.errors import UsageError

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_what_is_kept_comes_back_as_it_was(value: Any) -> None:
    back = decode_plain(encode_plain(plain(value, "value")))
    assert back == value
    assert encode_plain(back) == encode_plain(value)


def test_a_copy_is_taken_and_tuples_become_lists() -> None:
    inner = [1]
    copied = plain_dict({"a": (inner, "x")}, "value")
    inner.append(2)
    assert copied == {"a": [[1], "x"]}


def test_texts_and_numbers_of_other_classes_become_plain() -> None:
    class Name(StrEnum):
        FIRST = "first"

    copied = plain([Name.FIRST, np.float64(0.5)], "value")
    assert copied == ["first", 0.5]
    assert [type(each) for each in copied] == [str, float]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "value: expected"),
        ({"a": [0, math.inf]}, r"value.a\[1\]: expected"),
        ({"a": {1: 2}}, "value.a: expected texts as keys"),
        ([b"bytes"], r"value\[0\]: expected"),
        ({"x": np.int64(3)}, "value.x: expected"),
        ({"x": {1, 2}}, "value.x: expected"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_with_its_place(value: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plain(value, "value")


def test_values_that_contain_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="nested at most"):
        plain(endless, "value")


@pytest.mark.parametrize("content", [b"", b"{", b"NaN", b"[" * 200_000, b"\xff", b'{"a": Infinity}', b"9" * 5000])
def test_what_is_no_text_of_a_plain_value_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        decode_plain(content)


def test_the_first_difference_is_named_with_both_values() -> None:
    sides = ("left", "right")
    assert first_difference({"a": 1, "b": [1]}, {"a": 1, "b": [1]}, "model", sides) is None
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 2}}, "m", sides) == "m.a.b is 1 for left, and 2 for right"
    assert first_difference({"a": 1}, {}, "m", sides) == "m.a is 1 for left, and right has none"
    assert first_difference({}, {"a": 1}, "m", sides) == "m.a is 1 for right, and left has none"
    assert first_difference({"a": [1]}, {"a": {}}, "m", sides) == "m.a is [1] for left, and {} for right"
