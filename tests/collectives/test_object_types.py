"""Objects keep their types in every object collective, or are refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from tests.collectives.conftest import OpenRanks
from tests.net.wire.samples import DECLARED, KEPT, REFUSED, Colour, Level, same, type_of

Move = Callable[[Communicator, object], Coroutine[Any, Any, list[Any]]]


async def _message(comm: Communicator, value: object) -> list[Any]:
    if comm.rank == 0:
        await comm.send_object(value, 1)
        return []
    return [await comm.recv_object(0)]


async def _broadcast(comm: Communicator, value: object) -> list[Any]:
    return [await comm.broadcast_object(value if comm.rank == 0 else None)]


async def _scatter(comm: Communicator, value: object) -> list[Any]:
    return [await comm.scatter_object([value, value] if comm.rank == 0 else None)]


async def _gather(comm: Communicator, value: object) -> list[Any]:
    return await comm.gather_object(value, root=1) or []


MOVES: dict[str, Move] = {
    "broadcast_object": _broadcast,
    "all_gather_object": lambda comm, value: comm.all_gather_object(value),
    "gather_object": _gather,
    "scatter_object": _scatter,
    "send_object": _message,
}
"""Each returns the values that arrive."""


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
async def test_objects_keep_their_types(open_ranks: OpenRanks, move: Move) -> None:
    async with open_ranks(2) as ranks:
        for value in KEPT.values():
            results = await asyncio.gather(*(move(comm, value) for comm in ranks.communicators))
            arrived = [each for result in results for each in result]
            assert len(arrived) in (1, 2, 4)
            assert all(same(each, value) for each in arrived)


@pytest.mark.parametrize("name", MOVES)
async def test_objects_of_an_applications_types_are_refused_by_name(open_ranks: OpenRanks, name: str) -> None:
    async with open_ranks(2) as ranks:
        for value in DECLARED.values():
            # only the receiver of a message knows whether a type is declared
            concerned = ranks.communicators if name == "send_object" else ranks.communicators[:1]
            with pytest.raises(UsageError, match=type_of(value)):
                await asyncio.gather(*(MOVES[name](comm, value) for comm in concerned))


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
async def test_objects_that_cannot_keep_their_types_are_refused_by_name(open_ranks: OpenRanks, move: Move) -> None:
    async with open_ranks(2) as ranks:
        for value in REFUSED.values():
            with pytest.raises(UsageError, match=type(value).__name__):
                await move(ranks.communicators[0], value)


async def test_a_declared_type_is_made_on_all_ranks(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        for comm, result in zip(
            ranks.communicators,
            await asyncio.gather(*(c.all_gather_object(Colour.RED, wanted=Colour) for c in ranks.communicators)),
            strict=True,
        ):
            assert result == [Colour.RED, Colour.RED], comm
        sent = [
            comm.scatter_object([{1: Level.LOW}] * 2 if comm.rank == 0 else None, wanted=dict[int, Level])
            for comm in ranks.communicators
        ]
        assert all(same(result, {1: Level.LOW}) for result in await asyncio.gather(*sent))
