"""References are typed: the type checker is part of the gate, and an ignored error that is none fails it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, assert_type

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import UsageError


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.total = start

    @endpoint
    async def add(self, n: int) -> int:
        self.total += n
        return self.total

    @endpoint(concurrency=2)
    async def read(self) -> int:
        return self.total

    @endpoint
    def describe(self, prefix: str) -> str:
        return f"{prefix}{self.total}"

    @endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for n in range(to):
            yield n

    @endpoint
    async def twice(self, n: int) -> int:
        await self.add(n)
        return await self.add(n)


@pytest.mark.promise("typed")
async def test_calls_through_references_are_checked_by_the_type_checker(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ref = await _spawn(ranks.systems[1])
        assert_type(ref, Counter)
        assert assert_type(await ref.add(3), int) == 3
        assert assert_type(await ref.read(), int) == 3
        assert assert_type(await ref.describe("n = "), str) == "n = 3"
        assert assert_type(await ref.twice(1), int) == 5
        assert [assert_type(n, int) async for n in ref.count.stream(3)] == [0, 1, 2]
        with pytest.raises(UsageError, match="Expected `int`, got `str`"):
            await ref.add("3")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="misses 'n'"):
            await ref.add()  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="no endpoint of this name"):
            await ref.subtract(3)  # type: ignore[attr-defined]
        assert (assert_type(ref.name, str), assert_type(ref.rank, int)) == ("counter", 1)


async def test_a_reference_is_an_instance_of_its_actors_class(open_ranks: Any) -> None:
    class Other(Actor):
        pass

    async with open_ranks(1) as ranks:
        ref = await _spawn(ranks.systems[0])
        assert isinstance(ref, Counter)
        assert isinstance(ref, Actor)
        assert isinstance(ref, ActorRef)
        assert not isinstance(ref, Other)


async def _spawn(system: Any) -> Counter:
    ref: Counter = await system.spawn(Counter, name="counter")
    return ref
