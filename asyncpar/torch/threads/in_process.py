"""Worlds whose ranks are threads of one process, which need no sockets to meet."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from asyncpar.bootstrap import Attach, WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric

_HOST = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """The ``pg_options`` of a default group whose ranks are all in this process: how this rank gets there."""

    attach: Attach


def in_process_world(size: int) -> list[InProcess]:
    """Return the options of the ranks of one world, in which frames are handed over in memory."""
    members = tuple(Member(rank=rank, host=_HOST, host_id=_HOST, local_rank=rank) for rank in range(size))
    world, fabric = World(members=members), InprocFabric()

    def attach_as(rank: int) -> Attach:
        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            stack.callback(fabric.leave, rank)
            return WorldBootstrap(world=world, rank=rank, connector=InprocConnector(fabric), join=fabric.join)

        return attach

    return [InProcess(attach=attach_as(rank)) for rank in range(size)]
