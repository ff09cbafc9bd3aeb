"""A backend over a world that exists already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncpar.backends.backend import OpenBackend
from asyncpar.backends.config import BackendConfig
from asyncpar.collectives.communicator import Communicator


def existing(communicator: Communicator) -> OpenBackend:
    """Return a backend over the world of a node that runs already, which stays open: ``existing(node.world)``.

    The timeout of ``communicator`` is that of the configuration while the backend is open.
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
