"""What a backend is, and the names of those that come with asyncpar.

A backend is a function that takes a ``BackendConfig`` and returns an asynchronous context manager; entering that brings
this process into a world and gives the ``Communicator`` over all its ranks, leaving it leaves the world in good order.
All keep the promises of ``Communicator``, for which ``asyncpar.testing.collectives`` has the conformance suite.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from asyncpar.backends.config import BackendConfig
from asyncpar.collectives.communicator import Communicator

OpenBackend: TypeAlias = Callable[[BackendConfig], AbstractAsyncContextManager[Communicator]]
"""Brings this process into a world.  Entered and left in one task."""


class CommunicationBackend(enum.StrEnum):
    """What carries the messages of a world.  Others may be registered by any other name."""

    NATIVE = "native"
    """The lanes of asyncpar: shared memory, TCP, gRPC.  Ranks are started by ``asyncpar launch``."""
    THREAD = "thread"
    """Ranks of this process, on one event loop."""
    NCCL = "nccl"
    """Not part of this version."""
    MPI = "mpi"
    """Through mpi4py.  Ranks are started by ``mpiexec``."""
    GLOO = "gloo"
    """Through torch.  Ranks meet as those of ``torch.distributed`` do."""
