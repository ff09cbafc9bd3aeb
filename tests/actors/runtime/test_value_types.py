"""Values keep their types in every message of actors, or are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.errors import RemoteError, UsageError
from tests.net.wire.samples import DECLARED, KEPT, REFUSED, Colour, Level, Mode, same, type_of


class Echo(Actor):
    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    @endpoint
    async def value(self, value: Any) -> Any:
        self.kept = value
        return value

    @endpoint
    async def type_name(self, value: Any) -> str:
        self.kept = value
        return type(value).__name__

    @endpoint
    async def held(self) -> Any:
        return self.kept

    @endpoint
    async def find(self, name: str, place: int) -> Any:
        return {"KEPT": KEPT, "DECLARED": DECLARED, "REFUSED": REFUSED}[name].get([*KEPT, *DECLARED, *REFUSED][place])

    @endpoint
    async def items(self, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for value in values:
            yield value

    @endpoint
    async def colour(self, colour: Colour, mode: str, level: int, shape: tuple[int, ...]) -> dict[Colour, Any]:
        return {colour: [mode, level, shape]}


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    rank: int = request.param
    return rank


async def test_arguments_results_tells_and_items_keep_their_types(open_ranks: Any, home: int) -> None:
    async def values() -> AsyncIterator[Any]:
        for value in KEPT.values():
            yield value

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Echo, name="echo")
        for ref in (ranks.systems[0].ref("echo", rank=home), ranks.systems[0].ref("echo", rank=home, actor_class=Echo)):
            for value in KEPT.values():
                assert same(await ref.value(value), value)
                assert await ref.type_name(value=value) == type(value).__name__
                ref.type_name.tell([value])
                assert same(await ref.held(), [value])
            arrived = [item async for item in ref.items.stream(values())]
            assert same(arrived, [*KEPT.values()])
        started = await ranks.systems[0].spawn_on(home, Echo, ({(1, 2): {3}},))
        assert same(await started.held(), {(1, 2): {3}})


@pytest.mark.parametrize("typed", [False, True])
async def test_types_of_an_application_are_refused_by_name(open_ranks: Any, home: int, typed: bool) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Echo, name="echo")
        ref = ranks.systems[0].ref("echo", rank=home, **({"actor_class": Echo} if typed else {}))
        for place, value in enumerate([*KEPT.values(), *DECLARED.values()]):
            if place < len(KEPT):
                continue
            with pytest.raises(UsageError, match=f"{type_of(value)} cannot be received where no type is declared"):
                await ref.type_name(value)
            with pytest.raises(
                UsageError, match=rf"result of .*: a value of type .*{type_of(value)} cannot be received"
            ):
                await ref.find("DECLARED", place)
        assert await ref.type_name(1) == "int"


async def test_what_cannot_keep_its_type_is_refused_by_name(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Echo, name="echo")
        ref = ranks.systems[0].ref("echo", rank=home)
        for place, value in enumerate(REFUSED.values(), start=len(KEPT) + len(DECLARED)):
            with pytest.raises(UsageError, match=f"argument 1 of type_name.*{type(value).__name__}"):
                await ref.type_name(value)
            with pytest.raises(RemoteError, match=rf"the result of find\(\): .*{type(value).__name__}"):
                await ref.find("REFUSED", place)


async def test_declared_types_are_made(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Echo, name="echo")
        ref = ranks.systems[0].ref("echo", rank=home, actor_class=Echo)
        result: Any = await ref.colour(Colour.RED, Mode.FAST, Level.LOW, (1, 2))
        assert same(result, {Colour.RED: ["fast", 1, (1, 2)]})
