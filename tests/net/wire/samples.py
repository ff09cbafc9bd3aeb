"""Values of every type that people send: those that keep their types, those that a declared type must make anew, and
those that cannot be sent."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
import zoneinfo
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Place(namedtuple("Place", "x y")):
    pass


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Real(float):
    pass


class Blob(bytes):
    pass


class Items(list[Any]):
    pass


class Table(dict[Any, Any]):
    pass


class Row(tuple[Any, ...]):
    __slots__ = ()


class Bag(set[Any]):
    pass


class Frozen(frozenset[Any]):
    pass


class Day(datetime.date):
    pass


class Money(decimal.Decimal):
    pass


class Odd(enum.Enum):
    PAIR = (1, 2)


_MOMENT = datetime.datetime(2024, 2, 29, 13, 14, 15, 16)
_EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=45, microseconds=3))

KEPT: dict[str, object] = {
    "deque": deque([1, (2,)]),
    "bounded deque": deque([1, 2], 3),
    "float32": np.float32(0.1),
    "float64": np.float64(0.1),
    "int8": np.int8(-3),
    "uint64": np.uint64(2**64 - 1),
    "bool of numpy": np.bool_(True),
    "complex64": np.complex64(1 - 2j),
    "bfloat16": ml_dtypes.bfloat16(1.5),
    "None": None,
    "bool": True,
    "int": -3,
    "float": 2.5,
    "str": "text",
    "bytes": b"bytes",
    "list": [1, "a"],
    "dict": {"a": 1, 2: "b"},
    "tuple": (1, "a"),
    "empty tuple": (),
    "set": {1, 2},
    "set of tuples": {(1, 2), (3,)},
    "frozenset": frozenset({"a"}),
    "dict by tuple": {(1, 2): "x", None: (3,)},
    "dict by date": {datetime.date(2024, 2, 29): {1}},
    "dict by frozenset": {frozenset({1}): 2},
    "OrderedDict": OrderedDict([("b", 1), ("a", (2,))]),
    "Counter": Counter("abracadabra"),
    "Counter of tuples": Counter([(1, 2), (1, 2)]),
    "datetime": _MOMENT,
    "datetime UTC": _MOMENT.replace(tzinfo=datetime.UTC),
    "datetime east": _MOMENT.replace(tzinfo=_EAST),
    "datetime named": _MOMENT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "home")),
    "datetime fold": _MOMENT.replace(fold=1),
    "date": datetime.date(1, 1, 1),
    "time": datetime.time(23, 59, 59, 999999),
    "time east": datetime.time(1, tzinfo=_EAST),
    "timedelta": datetime.timedelta(days=-3, seconds=4, microseconds=5),
    "Decimal": decimal.Decimal("-1.2300E+7"),
    "Decimal infinity": decimal.Decimal("Infinity"),
    "UUID": uuid.UUID(int=12345),
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "complex": complex(-0.0, float("inf")),
    "range": range(10, 2, -3),
    "range beyond int64": range(0, 2**63, 5),
    "path": PosixPath("/a/b"),
    "pure path": PurePosixPath("a"),
    "nested": {"a": [({1}, [(datetime.date(2024, 1, 2),)])], "b": {"c": [Counter(a=1)]}},
}
"""Arrive equal and with the same types, whether or not a type is declared."""

DECLARED: dict[str, object] = {
    "Enum": Colour.RED,
    "IntEnum": Level.LOW,
    "StrEnum": Mode.FAST,
    "Flag": Access.READ,
    "namedtuple": Place(1, 2),
    "list of Enum": [1, [Colour.RED]],
    "dict by Enum": {Colour.RED: 1},
    "Enum in tuple": (1, {"a": Colour.RED}),
    "defaultdict": defaultdict(int, a=1),
    "subclass of list": Items([1]),
    "subclass of dict": Table(a=1),
    "subclass of tuple": Row((1,)),
    "subclass of set": Bag({1}),
    "subclass of frozenset": Frozen({1}),
}
"""Refused by name where no type is declared."""

REFUSED: dict[str, object] = {
    "subclass of str": Text("a"),
    "subclass of int": Number(1),
    "subclass of float": Real(1.0),
    "subclass of bytes": Blob(b"a"),
    "subclass of date": Day(2024, 1, 1),
    "subclass of Decimal": Money(1),
    "Enum of tuples": Odd.PAIR,
    "slice": slice(1, 2),
    "UserDict": UserDict(a=1),
    "ChainMap": ChainMap({"a": 1}),
    "dict_keys": {"a": 1}.keys(),
    "Fraction": Fraction(1, 3),
    "path of another system": PureWindowsPath("/a"),
    "SimpleNamespace": SimpleNamespace(a=1),
    "type": int,
    "Ellipsis": ...,
    "generator": (n for n in range(3)),
    "memoryview of ints": memoryview(bytearray(8)).cast("i"),
}
"""Refused by name where they are sent."""


def same(one: Any, other: Any) -> bool:
    """Are the two equal, and of the same types, down to what they hold?"""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, dict):
        return list(map(type, one)) == list(map(type, other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return sorted(map(str, map(type, one))) == sorted(map(str, map(type, other)))
    if isinstance(one, datetime.datetime | datetime.time):
        return repr(one) == repr(other) and one.fold == other.fold
    return True


def type_of(value: object) -> str:
    """Return the name by which the refusal of ``value`` calls it."""
    for named in ("Colour", "Level", "Mode", "Access"):
        if named in repr(value):
            return named
    return type(value).__name__


def zoned() -> datetime.datetime:
    """Return a time in a zone that the system must know."""
    return datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
