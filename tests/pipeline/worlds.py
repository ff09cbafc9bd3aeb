"""Worlds of in-process ranks for the tests of the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerLost
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.links import Links
from asyncpar.testing import run_virtual

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a small world."""

    fabric: InprocFabric
    links: tuple[Links, ...]
    communicators: tuple[Communicator, ...]

    def kill(self, rank: int) -> None:
        """Let ``rank`` disappear as a killed process would: its channels end, and it sends nothing more."""
        self.fabric.leave(rank)
        for other in range(len(self.links)):
            lane = self.links[rank].link(other).lane if other != rank else None
            if lane is not None:
                lane.abort(PeerLost("killed", rank=rank))


@asynccontextmanager
async def open_ranks(size: int, *, timeout: float | None = 300.0) -> AsyncIterator[Ranks]:
    """Open a world; at its end no task may be left behind."""
    before = asyncio.all_tasks()
    fabric = InprocFabric()
    world = World(members=tuple(Member(rank=rank, host="here", host_id="here") for rank in range(size)))
    async with AsyncExitStack() as stack:
        links = []
        for rank in range(size):
            links.append(
                await stack.enter_async_context(Links(world=world, rank=rank, connector=InprocConnector(fabric)))
            )
            fabric.join(links[-1])
        yield Ranks(fabric, tuple(links), tuple(Communicator.world(one, timeout=timeout) for one in links))
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "tasks were left behind"


async def outcomes(calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
    """Return what each call returns or raises."""
    return await asyncio.gather(*calls, return_exceptions=True)


def in_virtual_time(size: int, main: Callable[[Ranks], Awaitable[T]], **options: Any) -> T:
    """Run ``main`` on ``size`` ranks in virtual time."""

    async def run() -> T:
        async with open_ranks(size, **options) as ranks:
            return await main(ranks)

    return run_virtual(run())
