"""The native backend: the lanes of asyncpar itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncpar.backends.config import BackendConfig
from asyncpar.collectives.communicator import Communicator
from asyncpar.node import init


@asynccontextmanager
async def open_native(config: BackendConfig) -> AsyncIterator[Communicator]:
    """Join the world that ``asyncpar launch`` describes in the environment; alone, be a world of one.

    Raises as ``asyncpar.init`` does, and ``UsageError`` for a rank or world size that is not this process's.
    """
    config.refuse("native", "rendezvous")
    async with init(transport=config.transport) as node:
        config.check_place("native", rank=node.rank, world_size=node.size)
        yield node.world
