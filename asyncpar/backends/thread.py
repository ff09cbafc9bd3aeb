"""The thread backend: ranks of this process, each on the event loop of its thread, or several on one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from asyncpar.backends.config import BackendConfig
from asyncpar.bootstrap import PIN, WorldBootstrap
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.node import start_node


class ThreadBackend:
    """A world of ``size`` ranks in this process: one object, which all of them register or pass on.

    Each rank is taken once.  A configuration without a rank gets the lowest free one.  Ranks may be tasks of one event
    loop, or of the loops of several threads.
    """

    def __init__(self, size: int = 1) -> None:
        if size < 1:
            raise UsageError(f"size: expected at least 1 rank, got {size}")
        self.size = size
        self._world = World(members=tuple(Member(rank=rank, local_rank=rank) for rank in range(size)))
        self._fabric = InprocFabric()
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._arrived: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}

    @asynccontextmanager
    async def __call__(self, config: BackendConfig) -> AsyncIterator[Communicator]:
        """Open the backend as one of the ranks, once all of them have arrived.

        Raises ``PeerTimeout`` naming the ranks that do not arrive within ``config.timeout``; opening may be retried
        then.
        """
        async with self.open_as(self.take(config), config) as communicator:
            yield communicator

    @asynccontextmanager
    async def open_as(self, rank: int, config: BackendConfig) -> AsyncIterator[Communicator]:
        """Open the backend as ``rank``, which has been taken; see ``__call__``."""
        try:
            node = await start_node(lambda stack: self._attach(stack, rank))
        except BaseException:
            self._give_back(rank)
            raise
        try:
            try:
                await self._wait_for_all(rank, config.timeout)
            except BaseException:
                self._give_back(rank)
                raise
            yield node.world
        finally:
            await node.stop()

    def is_free(self, rank: int | None) -> bool:
        """Return whether ``rank`` (None: any) is still free."""
        return len(self._taken) < self.size and rank not in self._taken

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have been taken."""
        return len(self._taken) == self.size

    def take(self, config: BackendConfig) -> int:
        """Take the rank of ``config``, or the lowest free one, and return it."""
        config.refuse("thread", "transport", "rendezvous")
        if config.world_size is not None and config.world_size != self.size:
            raise UsageError(
                f"world_size: this thread backend has {self.size} rank{'s' * (self.size > 1)}, got "
                f"{config.world_size}; the ranks of a process meet in one ThreadBackend(world_size), given to all"
            )
        with self._lock:
            free = [rank for rank in range(self.size) if rank not in self._taken]
            if not free:
                raise UsageError(f"rank: all {self.size} ranks of this thread backend are taken")
            rank = free[0] if config.rank is None else config.rank
            if rank not in free:
                raise UsageError(f"rank: expected one of those that are free, {free}, got {rank}")
            self._taken.add(rank)
        return rank

    def _give_back(self, rank: int) -> None:
        """Make ``rank`` available again, unless the world was complete with it."""
        with self._lock:
            if len(self._arrived) < self.size:
                self._taken.discard(rank)
                self._arrived.pop(rank, None)

    async def _attach(self, stack: AsyncExitStack, rank: int) -> WorldBootstrap:
        stack.callback(self._fabric.leave, rank)
        return WorldBootstrap(
            world=self._world,
            rank=rank,
            connector=InprocConnector(self._fabric),
            join=self._fabric.join,
            pin=os.environ.get(PIN),
        )

    async def _wait_for_all(self, rank: int, timeout: float | None) -> None:
        loop, all_here = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._arrived[rank] = (loop, all_here)
            others = list(self._arrived.values()) if len(self._arrived) == self.size else []
        for other_loop, event in others:
            if other_loop is loop:
                event.set()
            else:
                _set_in(other_loop, event)
        try:
            async with asyncio.timeout(timeout):
                await all_here.wait()
        except TimeoutError:
            missing = [other for other in range(self.size) if other not in self._arrived]
            raise PeerTimeout(
                f"rank {rank}: waited {timeout} s for rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing))} of the thread backend to be opened",
                rank=missing[0] if missing else None,
                cause="it was not opened",
            ) from None


class ProcessThreads:
    """The thread backend of a process: ranks that open it with equal ``world_size`` meet, in any threads.

    The ``k``-th time that a rank opens a world of that size, it meets the others that do so for the ``k``-th time.  A
    configuration without ``world_size`` means a world of one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forming: dict[int, list[ThreadBackend]] = {}

    @asynccontextmanager
    async def __call__(self, config: BackendConfig) -> AsyncIterator[Communicator]:
        """Open the backend as one of the ranks; see ``ThreadBackend``."""
        size = config.world_size or 1
        with self._lock:
            forming = [world for world in self._forming.get(size, ()) if not world.is_complete]
            world = next((world for world in forming if world.is_free(config.rank)), None)
            if world is None:
                world = ThreadBackend(size)
                forming.append(world)
            self._forming[size] = forming
            rank = world.take(config)
        async with world.open_as(rank, config) as communicator:
            yield communicator


PROCESS_THREADS = ProcessThreads()
"""The backend of this process, where ranks that have nothing else in common meet."""


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set ``event`` of another thread's loop; ignore a closed loop."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)
