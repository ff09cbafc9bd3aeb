"""``records.dataclass`` makes the classes that the standard library makes."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, field
from itertools import product
from typing import Any

import pytest

from asyncpar.core.records import dataclass

OPTIONS = [
    dict(zip(("frozen", "slots", "kw_only", "eq"), values, strict=True)) for values in product((False, True), repeat=4)
]


def _make(decorate: Any, options: dict[str, bool]) -> Any:
    class Place:
        """A place."""

        name: str
        size: int = 3
        notes: list[int] = field(default_factory=list)
        hidden: str = field(default="", repr=False, compare=False)
        twice: int = field(init=False, repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.size)

    return decorate(**options)(Place)


def _tried(action: Any) -> object:
    try:
        return action()
    except (TypeError, AttributeError) as error:  # FrozenInstanceError is one
        return type(error)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(key for key, on in options.items() if on))
def test_a_class_behaves_as_one_of_the_standard_library(options: dict[str, bool]) -> None:
    ours, theirs = _make(dataclass, options), _make(dataclasses.dataclass, options)
    seen = []
    for kind in (ours, theirs):
        one, same, other = kind(name="a"), kind(name="a", hidden="x"), kind(name="b", size=4)
        seen.append(
            [
                options["eq"] is False or repr(one),  # else an address
                str(inspect.signature(kind)),
                kind.__match_args__,
                [(each.name, each.kw_only) for each in dataclasses.fields(kind)],
                one == same,
                one == other,
                one == ("a", 3, [], "", 6),
                one.notes is not same.notes,
                one.twice,
                _tried(lambda kind=kind: kind("a").name),
                _tried(lambda kind=kind: kind()),
                _tried(lambda kind=kind: kind(name="a", wrong=1)),
                _tried(lambda one=one: setattr(one, "size", 5)),
                _tried(lambda one=one: delattr(one, "hidden")),
                _tried(lambda one=one: hash(one) != 0),
                copy.copy(other).twice,
                repr(dataclasses.replace(other, size=7)),
                dataclasses.asdict(other),
                hasattr(one, "__dict__"),
            ]
        )
    assert seen[0] == seen[1]


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Lone:
    x: float


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


@dataclass(frozen=True, slots=True)
class Point3(Point):
    z: float = 0.0


def test_frozen_instances_are_pickled_hashed_and_refuse_changes() -> None:
    point = Point(1.0, 2.0)
    assert pickle.loads(pickle.dumps(point)) == point
    assert len({point, Point(1.0, 2.0), Point(2.0, 1.0)}) == 2
    assert len({Lone(1.0), Lone(1.0), Nothing(), Nothing()}) == 2
    nan = float("nan")
    assert Lone(nan) == Lone(nan), "compared as tuples are"
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 3.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'unknown'"):
        point.unknown = 3.0  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x


def test_a_class_that_inherits_fields_has_all_of_them() -> None:
    assert Point3(1.0, 2.0, 3.0) != Point(1.0, 2.0)
    assert repr(Point3(1.0, 2.0, 3.0)) == "Point3(x=1.0, y=2.0, z=3.0)"
    assert dataclasses.replace(Point3(1.0), z=4.0) == Point3(1.0, 0.0, 4.0)


def test_methods_of_the_class_stay() -> None:
    @dataclass(frozen=True)
    class Own:
        x: int

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    assert repr(Own(1)) == "mine"
    assert Own(1) == Own(2)
    assert hash(Own(1)) == 7


def test_a_record_in_itself_is_shown_once() -> None:
    @dataclass(slots=True)
    class Ring:
        next: Any = None

    ring = Ring()
    ring.next = ring
    assert repr(ring).endswith("Ring(next=...)")
