"""The thread backend: ranks of this process, on one event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from asyncpar.attachment import PIN, Attachment
from asyncpar.backends.config import BackendConfig
from asyncpar.collectives.communicator import Communicator
from asyncpar.config.world import Member, World
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.node import start_node
from asyncpar.transport.inproc import InprocConnector, InprocFabric


class ThreadBackend:
    """Where ``size`` ranks of this process meet: one object, which all of them register or pass on.

    A rank is taken once.  Those that do not say which they are get the lowest that is free.
    """

    def __init__(self, size: int = 1) -> None:
        if size < 1:
            raise UsageError(f"size: expected at least 1 rank, got {size}")
        self.size = size
        self._world = World(members=tuple(Member(rank=rank, local_rank=rank) for rank in range(size)))
        self._fabric = InprocFabric()
        self._taken: set[int] = set()
        self._arrived: set[int] = set()
        self._all_here = asyncio.Event()

    @asynccontextmanager
    async def __call__(self, config: BackendConfig) -> AsyncIterator[Communicator]:
        """Be one of the ranks, once all of them are there.

        Raises ``PeerTimeout``, naming them, when some do not come within ``config.timeout``.
        """
        rank = self._take(config)
        node = await start_node(lambda stack: self._attach(stack, rank))
        try:
            self._arrived.add(rank)
            if len(self._arrived) == self.size:
                self._all_here.set()
            await self._wait_for_all(rank, config.timeout)
            yield node.world
        finally:
            await node.stop()

    def _take(self, config: BackendConfig) -> int:
        config.refuse("thread", "transport", "rendezvous")
        if config.world_size is not None and config.world_size != self.size:
            raise UsageError(
                f"world_size: this thread backend has {self.size} rank{'s' * (self.size > 1)}, got "
                f"{config.world_size}; the ranks of a process meet in one ThreadBackend(world_size), given to all"
            )
        free = [rank for rank in range(self.size) if rank not in self._taken]
        if not free:
            raise UsageError(f"rank: all {self.size} ranks of this thread backend are taken")
        rank = free[0] if config.rank is None else config.rank
        if rank not in free:
            raise UsageError(f"rank: expected one of those that are free, {free}, got {rank}")
        self._taken.add(rank)
        return rank

    async def _attach(self, stack: AsyncExitStack, rank: int) -> Attachment:
        stack.callback(self._fabric.leave, rank)
        return Attachment(
            world=self._world,
            rank=rank,
            connector=InprocConnector(self._fabric),
            join=self._fabric.join,
            pin=os.environ.get(PIN),
        )

    async def _wait_for_all(self, rank: int, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._all_here.wait()
        except TimeoutError:
            missing = [other for other in range(self.size) if other not in self._arrived]
            raise PeerTimeout(
                f"rank {rank}: waited {timeout} s for rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing))} of the thread backend to be opened",
                rank=missing[0],
                cause="it was not opened",
            ) from None
