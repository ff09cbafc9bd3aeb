"""Actor systems of one process, joined by in-process lanes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.core.config.world import Member, World
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric, InprocLane
from asyncpar.net.transport.links import Links


@dataclass(frozen=True)
class Ranks:
    """The ranks of a small world."""

    fabric: InprocFabric
    links: tuple[Links, ...]
    systems: tuple[ActorSystem, ...]

    def kill(self, rank: int) -> None:
        """Let ``rank`` disappear as a killed process would: all its channels end at once."""
        self.fabric.leave(rank)
        for other, links in enumerate(self.links):
            if other != rank and links.is_up(rank):
                lane = links.link(rank).lane
                assert isinstance(lane, InprocLane)
                lane.cut("killed")


OpenRanks = Callable[[int], AbstractAsyncContextManager[Ranks]]


@asynccontextmanager
async def _open_ranks(size: int) -> AsyncIterator[Ranks]:
    before = asyncio.all_tasks()
    fabric = InprocFabric()
    world = World(members=tuple(Member(rank=rank) for rank in range(size)))
    async with AsyncExitStack() as stack:
        links, systems = [], []
        for rank in range(size):
            links.append(
                await stack.enter_async_context(Links(world=world, rank=rank, connector=InprocConnector(fabric)))
            )
            systems.append(await stack.enter_async_context(ActorSystem(links[-1])))
            fabric.join(links[-1])
        yield Ranks(fabric, tuple(links), tuple(systems))
    assert [system.pending for system in systems] == [0] * size, "calls were left behind"
    assert asyncio.all_tasks() == before, "tasks were left behind"


@pytest.fixture(scope="session")
def open_ranks() -> OpenRanks:
    """Open a world of so many ranks; at its end nothing may be left behind."""
    return _open_ranks
