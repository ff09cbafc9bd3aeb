"""The MPI backend: the collectives of asyncpar over point-to-point messages of MPI.

The messages of asyncpar's own algorithms travel over MPI, rather than each collective being one of MPI's: so keys,
order, mismatches, cancellation, deadlines, any numeric dtype and bit-identical results are the same as everywhere.  No
port is opened; rank and size are those of ``MPI.COMM_WORLD``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncpar.backends.config import BackendConfig, missing_library
from asyncpar.backends.errors import BackendUnavailable
from asyncpar.backends.mpi.world import MpiWorld
from asyncpar.collectives.communicator import Communicator
from asyncpar.node import start_node


@asynccontextmanager
async def open_mpi(config: BackendConfig) -> AsyncIterator[Communicator]:
    """Be the rank that ``mpiexec`` has started this process as.

    Raises ``BackendUnavailable`` without mpi4py or an MPI library, ``PeerTimeout`` when some process does not open the
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
    """Return the module ``mpi4py.MPI``, which starts MPI if nobody has.

    Raises ``BackendUnavailable`` if it cannot, or if MPI may not be called from this thread.
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
