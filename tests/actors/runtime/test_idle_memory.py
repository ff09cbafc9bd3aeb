"""Memory of actors that do nothing."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

from asyncpar.actors.runtime.actor import Actor, endpoint
from tests.actors.runtime.conftest import OpenRanks

COUNT = 500
MOST_BYTES = 2_300
"""Bytes of an idle actor, with its task and its contexts, which are asyncio's: 1,750 in Python 3.11."""


class Idle(Actor):
    """Does nothing."""

    def __init__(self, argument: object = None) -> None:
        self.seen = argument is not None

    @endpoint
    async def look(self) -> bool:
        return self.seen


class Argument:
    """What an actor is constructed with."""


async def test_an_idle_actor_takes_two_kilobytes(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:
        (system,) = ranks.systems
        await system.spawn(Idle)  # makes what all actors of a class share
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(COUNT):
                await system.spawn(Idle)
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken / COUNT < MOST_BYTES


async def test_an_actor_does_not_keep_what_it_was_constructed_with(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:
        (system,) = ranks.systems
        argument = Argument()
        gone = weakref.ref(argument)
        ref = await system.spawn(Idle, argument)
        del argument
        gc.collect()
        assert gone() is None
        assert await ref.look()
