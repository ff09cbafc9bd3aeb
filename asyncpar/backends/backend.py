"""The interface of a backend, and the names of the built-in ones.

A backend is a function that takes a ``BackendConfig`` and returns an asynchronous context manager; entering that brings
this process into a world and returns the ``Communicator`` over all its ranks, leaving it leaves the world and notifies
the others.  All keep the guarantees of ``Communicator``, for which ``asyncpar.testing.collectives`` has the conformance
suite.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from asyncpar.backends.config import BackendConfig
from asyncpar.collectives.communicator import Communicator
from asyncpar.node import init

OpenBackend: TypeAlias = Callable[[BackendConfig], AbstractAsyncContextManager[Communicator]]
"""Brings this process into a world.  Must be entered and left in the same task."""


class CommunicationBackend(enum.StrEnum):
    """The built-in backends.  Others may be registered under any other name."""

    NATIVE = "native"
    """The lanes of asyncpar: shared memory, TCP, gRPC.  Ranks are started by ``asyncpar launch``."""
    THREAD = "thread"
    """Ranks of this process, on one event loop."""
    NCCL = "nccl"
    """Like native, and arrays on CUDA devices by NCCL, through nccl4py."""
    MPI = "mpi"
    """Through mpi4py.  Ranks are started by ``mpiexec``."""
    GLOO = "gloo"
    """Through torch.  Ranks rendezvous like those of ``torch.distributed``."""


def existing(communicator: Communicator) -> OpenBackend:
    """Return a backend over the world of a running node, which stays open: ``existing(node.world)``.

    While the backend is open, the timeout of ``communicator`` is that of the configuration.
    """

    @asynccontextmanager
    async def open_backend(config: BackendConfig) -> AsyncIterator[Communicator]:
        config.refuse("existing", "transport", "rendezvous")
        config.check_place("existing", rank=communicator.rank, world_size=communicator.size)
        timeout = communicator.timeout
        try:
            yield communicator
        finally:
            communicator.timeout = timeout

    return open_backend


@asynccontextmanager
async def open_native(config: BackendConfig) -> AsyncIterator[Communicator]:
    """Join the world that ``asyncpar launch`` describes in the environment; outside a job, be a world of one.

    Raises like ``asyncpar.init``, and ``UsageError`` for a rank or world size that is not this process's.
    """
    config.refuse("native", "rendezvous")
    async with init(transport=config.transport) as node:
        config.check_place("native", rank=node.rank, world_size=node.size)
        yield node.world
