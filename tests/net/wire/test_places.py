"""Errors of values that cannot be sent name the place, and what is no plain data is refused where it would change."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.net.wire.payload import PayloadEncoder, decode_payload, encode_payload


@dataclass
class Holder:
    name: str
    inner: Any = None


class Record(msgspec.Struct):
    inner: Any


class Text(str):
    __slots__ = ()


WRONG = [object(), Text("a"), np.zeros((2, 2)).view(np.matrix), 2**80, np.array([object()])]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize(
    ("build", "place"),
    [
        (lambda wrong: [1, wrong], "[1]"),
        (lambda wrong: {"a": [0, {"b": wrong}]}, "['a'][1]['b']"),
        (lambda wrong: (1, Holder("x", [wrong])), "[1].inner[0]"),
        (lambda wrong: Record({3: wrong}), ".inner[3]"),
    ],
)
def test_the_error_names_the_place(build: Any, place: str, wrong: object) -> None:
    with pytest.raises(UsageError) as raised:
        encode_payload(build(wrong), what="value")
    assert str(raised.value).startswith(f"value, at {place}: ")
    assert str(raised.value).count("value, at") == 1
    with pytest.raises(UsageError, match=r"^argument 1 of add"):
        PayloadEncoder().part(wrong, what="argument 1 of add()")


@pytest.mark.parametrize("value", [Holder("x"), Record(1)], ids=str)
def test_records_need_a_declared_type(value: Any) -> None:
    for inside in (value, [value], {"a": value}):
        with pytest.raises(UsageError, match=r"of type .* cannot be sent where no type is declared"):
            encode_payload(inside, what="value", declares=False)
    assert decode_payload(encode_payload(value, what="value"), type(value)) == value


def test_scalars_are_numbers_where_numbers_are_declared() -> None:
    def roundtrip(value: object, kind: Any) -> Any:
        return decode_payload(encode_payload(value, what="value"), kind)

    for value, kind in (
        (np.int64(3), int),
        (np.float32(0.5), float),
        (np.bool_(True), bool),
        (np.complex64(1j), complex),
    ):
        found = roundtrip(value, kind)
        assert (found, type(found)) == (value.item(), kind)
    assert type(roundtrip(np.int64(3), np.float32)) is np.float32
    assert roundtrip({"a": [np.int8(1)]}, dict[str, list[int]]) == {"a": [1]}
    assert type(roundtrip([np.int8(1)], list[Any])[0]) is np.int8
    assert type(roundtrip(Holder("x", np.float32(2)), Holder).inner) is np.float32


def test_kinds_of_dictionaries_need_a_declared_type() -> None:
    with pytest.raises(UsageError, match="defaultdict cannot be sent where no type"):
        encode_payload(defaultdict(int, a=1), what="value", declares=False)
    assert decode_payload(encode_payload(defaultdict(int, a=1), what="value"), dict[str, int]) == {"a": 1}
