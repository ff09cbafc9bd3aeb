"""Communicators of one process, joined by in-process lanes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerLost
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.links import Links
from tests.collectives.sampled_sizes import shared_worlds
from tests.small_arenas import small_arenas

__all__ = ["open_ranks", "shared_worlds", "small_arenas"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a small world."""

    fabric: InprocFabric
    links: tuple[Links, ...]
    communicators: tuple[Communicator, ...]

    def kill(self, rank: int) -> None:
        """Let ``rank`` disappear as a killed process would: its channels end, and it says nothing more."""
        self.fabric.leave(rank)
        for other in range(len(self.links)):
            lane = self.links[rank].link(other).lane if other != rank else None
            if lane is not None:
                lane.abort(PeerLost("killed", rank=rank))


OpenRanks = Callable[..., AbstractAsyncContextManager[Ranks]]


@asynccontextmanager
async def _open_ranks(
    size: int, *, hosts: tuple[str, ...] | None = None, pin: str | None = None, timeout: float | None = 300.0
) -> AsyncIterator[Ranks]:
    before = asyncio.all_tasks()
    fabric = InprocFabric()
    names = hosts or ("localhost",) * size
    world = World(members=tuple(Member(rank=rank, host=name, host_id=name) for rank, name in enumerate(names)))
    async with AsyncExitStack() as stack:
        links = []
        for rank in range(size):
            links.append(
                await stack.enter_async_context(Links(world=world, rank=rank, connector=InprocConnector(fabric)))
            )
            fabric.join(links[-1])
        communicators = tuple(Communicator.world(one, pin=pin, timeout=timeout) for one in links)
        yield Ranks(fabric, tuple(links), communicators)
    assert asyncio.all_tasks() == before, "tasks were left behind"


@pytest.fixture(scope="session")
def open_ranks() -> OpenRanks:
    """Open a world of so many ranks; at its end no task may be left behind."""
    return _open_ranks
