"""Declaring actors and endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import UsageError


class Base(Actor):
    @endpoint
    async def one(self) -> int:
        return 1

    def helper_method(self) -> int:
        return 7


class Derived(Base):
    @endpoint
    async def two(self) -> int:
        return 1 + await self.one()


def test_endpoints_are_inherited_and_nothing_else_is_one() -> None:
    assert Base.endpoints == {"one"}
    assert Derived.endpoints == {"one", "two"}


def test_an_endpoint_stays_a_plain_method() -> None:
    assert asyncio.run(Derived().two()) == 2


@pytest.mark.parametrize(
    "name", ["_private", "__dunder__", "on_start", "on_stop", "ref", "name", "rank", "spawn", "watch"]
)
def test_private_and_reserved_names_cannot_be_endpoints(name: str) -> None:
    async def method(self: Actor) -> None: ...

    with pytest.raises(UsageError, match=f"Wrong.{name} cannot be one; the name is private or reserved"):
        type("Wrong", (Actor,), {name: endpoint(method)})


def test_hiding_an_endpoint_with_a_plain_method_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"Hiding.one hides an endpoint of Base; mark it"):
        type("Hiding", (Base,), {"one": lambda self: 1})


def test_plain_generators_cannot_be_endpoints() -> None:
    def numbers(self: Actor) -> Iterator[int]:
        yield 1

    with pytest.raises(UsageError, match="is a plain generator; expected async def for a stream"):
        endpoint(numbers)


@pytest.mark.parametrize("thing", [7, print, staticmethod(len), property()], ids=lambda thing: type(thing).__name__)
def test_only_functions_can_be_endpoints(thing: Any) -> None:
    with pytest.raises(UsageError, match=r"endpoint: expected a method \(async def or def\)"):
        endpoint(thing)


def test_there_is_no_reference_before_the_actor_is_spawned() -> None:
    with pytest.raises(UsageError, match="ref: Base was not spawned yet"):
        _ = Base().ref


async def test_an_annotation_that_cannot_be_resolved_is_named(open_ranks: Any) -> None:
    class Local:
        pass

    class Wrong(Actor):
        @endpoint
        async def take(self, value: Local) -> None: ...

    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match=r"Wrong.take: its annotations cannot be resolved .*'Local'"):
            await ranks.systems[0].spawn(Wrong)


async def test_an_annotation_that_cannot_be_checked_is_named(open_ranks: Any) -> None:
    class Wrong(Actor):
        @endpoint
        async def take(self, value: np.ndarray | int) -> None: ...

    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match=r"endpoint .*Wrong.take: argument 'value' of .*Wrong.take\(\): type: "):
            await ranks.systems[0].spawn(Wrong)


class Signatures(Actor):
    @endpoint
    async def mixed(self, a: int, /, b: str = "b", *rest: int, c: float, d: bool = False, **others: str) -> list[Any]:
        return [a, b, rest, c, d, others]

    @endpoint
    async def bare(self, value, other=2):  # type: ignore[no-untyped-def]
        return [value, other]

    @endpoint
    async def pair(self, peers: list[ActorRef[Base]] | None = None) -> int:
        return 0 if peers is None else len(peers)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {"c": 2}, [1, "b", (), 2.0, False, {}]),
        ((1, "x", 3, 4), {"c": 2.5, "d": True, "e": "f"}, [1, "x", (3, 4), 2.5, True, {"e": "f"}]),
        ((1,), {"b": "y", "c": 1, "a": "other a"}, [1, "y", (), 1.0, False, {"a": "other a"}]),
    ],
)
async def test_every_kind_of_parameter_is_bound(open_ranks: Any, args: Any, kwargs: Any, expected: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Signatures, name="s")
        assert await ranks.systems[0].ref("s", rank=1).mixed(*args, **kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {"c": 1}, r"Signatures.mixed\(\) misses 'a'; it takes \(a, b, \*rest, c, d, \*\*others\)"),
        ((1,), {}, r"misses 'c'"),
        ((1, "x", "3"), {"c": 1}, r"argument 'rest' of Signatures.mixed\(\): Expected `int`, got `str`"),
        ((1,), {"c": 1, "e": 5}, r"argument 'others' of Signatures.mixed\(\): Expected `str`, got `int`"),
        ((1, "x"), {"c": 1, "b": "x"}, r"got argument 'b' twice"),
    ],
)
async def test_every_kind_of_parameter_is_checked(open_ranks: Any, args: Any, kwargs: Any, text: str) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Signatures, name="s")
        with pytest.raises(UsageError, match=text):
            await ranks.systems[0].ref("s", rank=1).mixed(*args, **kwargs)


async def test_parameters_without_annotation_take_anything(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Signatures, name="s")
        assert await ranks.systems[0].ref("s", rank=1).bare({"a": [1]}) == [{"a": [1]}, 2]


async def test_references_inside_of_other_values_are_checked(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ref = await ranks.systems[0].spawn(Signatures)
        assert await ref.pair([ref, ref]) == 2
        assert await ref.pair(None) == 0
        with pytest.raises(UsageError, match=r"argument 'peers' of Signatures.pair\(\): Expected `.*ActorRef"):
            await ref.pair(["someone"])
