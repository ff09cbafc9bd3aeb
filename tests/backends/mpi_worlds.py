"""Worlds of any size over however many processes ``mpiexec`` has started, even one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from asyncpar.backends.mpi.backend import MpiWorld, load_mpi
from asyncpar.collectives.communicator import Communicator
from asyncpar.node import start_node

PATIENCE_SECONDS = 30.0


@asynccontextmanager
async def spread_world(size: int) -> AsyncIterator[Sequence[Communicator]]:
    """Deal ``size`` ranks out to all processes and yield the communicators of those in this one.

    A world with fewer ranks than processes is made in each process for itself.
    """
    mpi = load_mpi()
    everyone = mpi.COMM_WORLD if size >= mpi.COMM_WORLD.Get_size() else mpi.COMM_SELF
    process, processes = everyone.Get_rank(), everyone.Get_size()
    world = await MpiWorld.open(mpi, everyone, size=size, timeout=PATIENCE_SECONDS)
    nodes = await asyncio.gather(*(start_node(world.attach(rank)) for rank in range(process, size, processes)))
    try:
        for node in nodes:
            node.world.timeout = PATIENCE_SECONDS
        yield [node.world for node in nodes]
    finally:
        async with asyncio.timeout(PATIENCE_SECONDS):  # a rank may be through with what others have not begun
            everyone_is_through = everyone.Ibarrier()
            while not everyone_is_through.Test():  # noqa: ASYNC110  # MPI announces nothing
                await asyncio.sleep(0)
        await asyncio.gather(*(node.stop() for node in nodes))
        world.free()
