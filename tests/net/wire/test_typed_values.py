"""Values keep their types on their way, or are refused by name."""

from __future__ import annotations

import datetime
import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder, decode_payload, encode_payload
from tests.net.wire.samples import DECLARED, KEPT, REFUSED, Access, Colour, Items, Level, Mode, same, type_of, zoned


class Spot(NamedTuple):
    x: int
    y: int


@dataclass
class Run:
    name: str
    shape: tuple[int, ...]
    tags: set[str] = field(default_factory=set)
    extra: Any = None
    colour: Colour = Colour.RED


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    at: datetime.datetime
    extra: Any


def roundtrip(value: object, kind: Any = Any) -> Any:
    return decode_payload(bytearray(encode_payload(value, what="value")), kind, what="value")


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("kind", [Any, object, Any | None], ids=str)
def test_a_value_keeps_its_type_where_none_is_declared(value: object, kind: Any) -> None:
    for inside in (value, [value], {"a": [1, value]}, (value, 2), {"a": {"b": value}}, OrderedDict(a=value)):
        assert same(roundtrip(inside, kind), inside)


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
def test_a_value_keeps_its_type_where_it_is_declared(value: object) -> None:
    assert same(roundtrip(value, type(value)), value)
    assert same(roundtrip([value], list[Any]), [value])
    assert same(roundtrip(Run("a", (1, 2), {"t"}, extra=value), Run), Run("a", (1, 2), {"t"}, extra=value))
    assert same(roundtrip(Run("a", (1,), extra=value), Run).extra, value)


@pytest.mark.parametrize("value", DECLARED.values(), ids=DECLARED)
def test_a_type_of_an_application_is_refused_by_name_where_none_is_declared(value: object) -> None:
    for inside in (value, [value], (value,), {"a": [value]}):
        with pytest.raises(
            UsageError, match=rf"^value(, at \S+)?: a value of type .*{type_of(value)} cannot be sent where no type"
        ):
            encode_payload(inside, what="value", declares=False)
        for kind in (Any, object):
            with pytest.raises(
                UsageError, match=f"^value: a value of type .*{type_of(value)} cannot be received where"
            ):
                roundtrip(inside, kind)
    with pytest.raises(UsageError, match=type_of(value)):
        roundtrip(Run("a", (), extra=[value]), Run)


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(value: object) -> None:
    for inside in (value, [value], (1, value), {"a": {"b": value}}, Run("a", (), extra=value)):
        with pytest.raises(UsageError, match=rf"^value(, at \S+)?: a.* .*{type(value).__name__}.* cannot be sent"):
            encode_payload(inside, what="value")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Colour.RED, Colour),
        (Level.LOW, Level),
        (Mode.FAST, Mode),
        (Access.READ, Access),
        (Spot(1, 2), Spot),
        ([Colour.RED, (Spot(1, 2), Level.LOW)], tuple[Colour, tuple[Spot, Level]]),
        ({Colour.RED: {Spot(1, 2)}}, dict[Colour, set[Spot]]),
        (Run("a", (1, 2), {"x"}, extra=(1, {2})), Run),
        ([Run("a", (), colour=Colour.RED)], list[Run]),
        (Step(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), {1: (2,)}), Step),
        (((1, "a"), [{1}]), tuple[tuple[int, str], list[set[int]]]),
        (Counter("aab"), Counter),
        (OrderedDict(b=1, a=2), OrderedDict),
        (datetime.timedelta(1), datetime.timedelta | None),
        (UUID(int=3), UUID | int),
    ],
    ids=str,
)
def test_a_declared_type_is_made(value: object, kind: Any) -> None:
    result = roundtrip(value, kind)
    wanted = tuple(value) if isinstance(value, list) and "tuple" in str(kind) else value
    assert (result, type(result)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        ((1, 2), list[int], [1, 2]),
        ({1}, list[int], [1]),
        ([1], set[int], {1}),
        (Items([1]), list[int], [1]),
        (Counter(a=1), dict[str, int], {"a": 1}),
        (bytearray(b"a"), bytes, b"a"),
        pytest.param(memoryview(b"a"), bytes, b"a", id="memoryview"),
        (Level.LOW, int, 1),
        (Mode.FAST, str, "fast"),
        ([Mode.FAST], list[str], ["fast"]),
        (Spot(1, 2), tuple[int, int], (1, 2)),
        (Spot(1, 2), list[float], [1.0, 2.0]),
    ],
    ids=lambda value: "memoryview" if isinstance(value, memoryview) else str(value),
)
def test_a_declaration_decides_over_the_type_that_was_sent(value: object, kind: Any, result: object) -> None:
    assert same(roundtrip(value, kind), result)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ((1, "a"), list[int], "Expected `int`, got `str` - at "),
        ({1}, dict[str, int], "Expected `object`, got `set`"),
        (Decimal(1), str, "Expected `str`, got `decimal`"),
        ((np.zeros(2),), list[int], "Expected `int`, got"),
        (Colour.RED, Level, "Expected `int`, got `str`"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_its_declaration_says_so(value: object, kind: Any, text: str) -> None:
    with pytest.raises(UsageError, match=f"^value: {text}"):
        roundtrip(value, kind)


def test_arrays_inside_typed_values_arrive() -> None:
    value = (np.arange(3), {"a": (np.ones((2, 2)), {1})})
    first, second = roundtrip(value)
    assert first.tolist() == [0, 1, 2]
    assert second["a"][0].tolist() == [[1, 1], [1, 1]]
    typed = roundtrip(value, tuple[np.ndarray, dict[str, Any]])
    assert typed[0].tolist() == [0, 1, 2]
    assert same(typed[1]["a"][1], {1})


def test_what_is_sent_stays_as_it_is() -> None:
    run = Run("a", (1, 2), {"x"}, extra=[(1,), Colour.RED])
    step = Step(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), {"a": (1,)})
    before = repr([run, step])
    encode_payload([run, step], what="value")
    assert repr([run, step]) == before


def test_a_time_zone_is_kept_or_refused_by_name() -> None:
    arrived = roundtrip(zoned())
    assert (arrived, repr(arrived)) == (zoned(), repr(zoned()))

    class Elsewhere(datetime.tzinfo):
        def utcoffset(self, moment: object) -> None:
            return None

        dst = tzname = utcoffset

    with pytest.raises(UsageError, match=r"value: a time zone of type .*Elsewhere cannot be sent; expected"):
        roundtrip(datetime.time(1, tzinfo=Elsewhere()))


def test_plain_values_for_other_languages_lose_declared_types_only() -> None:
    decoder = PayloadDecoder[Any](Any, as_plain=True)
    payload = encode_payload([Colour.RED, Spot(1, 2), {1}, Access.READ | Access.WRITE], what="value")
    assert same(decoder.decode(payload, what="value"), ["red", (1, 2), {1}, 3])


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
keys = plain | st.dates() | st.tuples(st.integers(0, 9)) | st.frozensets(st.integers(0, 9)) | st.uuids()
anything = st.recursive(
    keys
    | st.datetimes()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.sets(st.integers(0, 9))
    | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=10,
)


@given(anything)
def test_any_nest_of_values_keeps_its_types(value: object) -> None:
    assert same(roundtrip(value), value)


NO_CONTENTS: list[Any] = [
    *(None, -1, 1 << 63, "?", b"?", [1], [[1]], [{}], [[{}, 1]], {"a": 1}, ["a", 2, "b"], [None] * 3),
    *(["2024-01-01", 7, None], ["2024-01-01", 0, [1 << 62]], ["2024-01-01", 0, "../../etc/passwd"]),
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        *(
            msgspec.msgpack.encode(body)
            for body in ([1], [1, 2, 3], ["a", 1], [True, []], [99, []], [0, 1], [0, ["a"]])
        ),
        *(msgspec.msgpack.encode([0, body]) for body in ([1, 2], ["a", 1.5], ["a", None], ["a", b"x"])),
        *(msgspec.msgpack.encode([code, body]) for code in (-1, *range(16)) for body in NO_CONTENTS),
    ],
)
def test_hostile_content_is_a_protocol_error_or_a_value(content: bytes) -> None:
    encoded = msgspec.msgpack.encode(Ext(2, content))
    payload = b"\x01\0\0\0" + len(encoded).to_bytes(4, "little") + encoded
    for kind in (Any, set[int], Run, Colour, datetime.datetime | None, list[Any]):
        try:
            value = decode_payload(payload, kind)
        except (ProtocolError, UsageError):
            continue
        assert isinstance(value, object)


def test_a_deep_nest_from_outside_is_a_protocol_error() -> None:
    encoded = msgspec.msgpack.encode([1, []])
    for _ in range(3000):
        encoded = msgspec.msgpack.encode([1, [Ext(2, encoded)]])
    encoded = msgspec.msgpack.encode(Ext(2, encoded))
    payload = b"\x01\0\0\0" + len(encoded).to_bytes(4, "little") + encoded
    with pytest.raises(ProtocolError, match=r"recursion|overflow"):
        decode_payload(payload)


def test_an_unknown_time_zone_is_named() -> None:
    encoded = msgspec.msgpack.encode(Ext(2, msgspec.msgpack.encode([7, ["2024-01-01T00:00:00", 0, "Not/There"]])))
    payload = b"\x01\0\0\0" + len(encoded).to_bytes(4, "little") + encoded
    with pytest.raises(UsageError, match=r"payload: a time zone cannot be used here: .*Not/There"):
        decode_payload(payload)


def test_members_of_enumerations_are_distinguished_from_their_values_in_keys() -> None:
    class Key(enum.Enum):
        A = "a"

    with pytest.raises(UsageError, match="Key cannot be received"):
        roundtrip({Key.A: 1, "a": 2})


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("value", [(1, 2), {1}, Decimal("1.5"), UUID(int=5), bytearray(b"x")], ids=repr)
def test_a_value_keeps_its_type_at_any_depth_and_place(value: object, depth: int) -> None:
    whole: object = [1, value, {"x": 1.0}]
    for level in range(depth):
        whole = [[1], whole, []] if level % 2 else {"a": {}, "b": whole, "c": [2]}
    assert repr(roundtrip(whole)) == repr(whole)


def test_a_list_that_holds_itself_often_is_refused() -> None:
    endless: list[object] = []
    endless += [endless] * 10
    with pytest.raises(UsageError, match="cannot be sent"):
        encode_payload(endless, what="x")
