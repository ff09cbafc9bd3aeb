"""The MPI backend: the collectives of asyncpar over point-to-point messages of MPI.

MPI carries the messages of asyncpar's own algorithms; its collectives are not used: so keys, order, mismatches,
cancellation, deadlines, any numeric dtype and bit-identical results are the same as everywhere.  No port is opened;
rank and size are those of ``MPI.COMM_WORLD``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import numpy as np

from asyncpar.backends.config import BackendConfig, BackendUnavailable, missing_library
from asyncpar.backends.message_lane import MessageConnector
from asyncpar.backends.mpi.progress import MpiProgress
from asyncpar.bootstrap import PIN, Attach, WorldBootstrap
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.transport import LaneCosts
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerTimeout
from asyncpar.node import start_node

_COSTS = LaneCosts(latency=30e-6, bandwidth=2e9)
_NAME_BYTES = 256


class MpiWorld:
    """A world over all processes of an MPI communicator: usually with one rank in each.

    The engines of its ranks share private communicators.
    """

    def __init__(self, mpi: Any, communicators: list[Any], world: World) -> None:
        self.world = world
        self._mpi = mpi
        self._communicators = communicators
        self._engines: list[MpiProgress] = []

    @classmethod
    async def open(cls, mpi: Any, everyone: Any, *, size: int | None = None, timeout: float | None) -> Self:
        """Create the world together with all processes of ``everyone``, with ``size`` ranks, by default one per
        process.

        More are assigned to the processes in turn.  Raises ``PeerTimeout`` unless all processes do this within
        ``timeout`` seconds.
        """
        processes: int = everyone.Get_size()
        size = processes if size is None else size
        communicators = [await _duplicate(mpi, everyone, timeout) for _ in range(-(-size // processes))]
        hosts = await _gather_hosts(mpi, communicators[0], timeout)
        return cls(mpi, communicators, _make_world(hosts, size))

    def attach(self, rank: int) -> Attach:
        """Attach to the world as ``rank``, which must be one of this process."""

        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            engine = MpiProgress(self._mpi, self._communicators, rank=rank, size=self.world.size)
            self._engines.append(engine)
            stack.push_async_callback(engine.close)
            connector = MessageConnector(engine, kind="mpi")
            return WorldBootstrap(
                world=self.world,
                rank=rank,
                connector=connector,
                join=connector.join,
                pin=os.environ.get(PIN),
                lane=_COSTS,
            )

        return attach

    def free(self) -> None:
        """Free the communicators, once all nodes have stopped.

        They are not freed if messages may be left in them, which would appear in communicators that MPI creates later.
        """
        if all(engine.is_through for engine in self._engines):
            for communicator in self._communicators:
                communicator.Free()


async def _until_done(request: Any, timeout: float | None, what: str) -> None:
    try:
        async with asyncio.timeout(timeout):
            while not request.Test():  # noqa: ASYNC110  # MPI announces nothing
                await asyncio.sleep(0)
    except TimeoutError:
        raise PeerTimeout(f"mpi: waited {timeout} s for all processes to {what}", cause="not all came") from None


async def _duplicate(mpi: Any, communicator: Any, timeout: float | None) -> Any:
    copy, request = communicator.Idup()
    await _until_done(request, timeout, "open the backend")
    copy.Set_errhandler(mpi.ERRORS_RETURN)
    return copy


async def _gather_hosts(mpi: Any, communicator: Any, timeout: float | None) -> list[str]:
    """Return the names of the hosts of all processes."""
    name = np.zeros(_NAME_BYTES, np.uint8)
    encoded = mpi.Get_processor_name().encode()[:_NAME_BYTES]
    name[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    names = np.empty((communicator.Get_size(), _NAME_BYTES), np.uint8)
    await _until_done(communicator.Iallgather(name, names), timeout, "say where they run")
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in names]


def _make_world(hosts: list[str], size: int) -> World:
    """Return the world of ``size`` ranks, assigned to processes on ``hosts``."""
    placed = [hosts[rank % len(hosts)] for rank in range(size)]
    return World(
        members=tuple(
            Member(rank=rank, host=host, host_id=host, local_rank=placed[:rank].count(host))
            for rank, host in enumerate(placed)
        ),
        job="mpi",
    )


@asynccontextmanager
async def open_mpi(config: BackendConfig) -> AsyncIterator[Communicator]:
    """Open the backend as the rank that ``mpiexec`` has given this process.

    Raises ``BackendUnavailable`` without mpi4py or an MPI library, ``PeerTimeout`` if some process does not open the
    backend within ``config.timeout``, ``UsageError`` for a rank or world size other than MPI's.
    """
    config.refuse("mpi", "transport", "rendezvous")
    mpi = load_mpi()
    everyone = mpi.COMM_WORLD
    rank, size = everyone.Get_rank(), everyone.Get_size()
    config.check_place("mpi", rank=rank, world_size=size)
    world = await MpiWorld.open(mpi, everyone, timeout=config.timeout)
    node = await start_node(world.attach(rank))
    try:
        yield node.world
    finally:
        await node.stop()
        world.free()


def load_mpi() -> Any:
    """Return the module ``mpi4py.MPI``, which starts MPI unless it is running.

    Raises ``BackendUnavailable`` if that fails, or if MPI may not be called from this thread.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise missing_library("mpi", "mpi4py", error) from error
    except RuntimeError as error:
        raise BackendUnavailable(
            f"backend: mpi needs an MPI library, which mpi4py does not find ({error}); "
            "install one, for example with: pip install mpich"
        ) from error
    level = MPI.Query_thread()
    if level == MPI.THREAD_SINGLE or (level == MPI.THREAD_FUNNELED and not MPI.Is_thread_main()):
        raise BackendUnavailable(
            "backend: mpi needs an MPI library that may be called from this thread; set mpi4py.rc.thread_level to "
            '"serialized" or "multiple" before mpi4py.MPI is imported'
        )
    return MPI
