"""A backend that is open, held so by a task of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncpar.backends.backend import OpenBackend
from asyncpar.backends.compression import CompressionAlgorithm
from asyncpar.backends.config import BackendConfig
from asyncpar.backends.group import CommunicationGroup
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBackend:
    """The world of a backend, until ``close``, which any task may call."""

    name: str
    communicator: Communicator
    compression: CompressionAlgorithm
    task: asyncio.Task[None]
    is_closing: asyncio.Event

    def group(self, name: str, communicator: Communicator) -> CommunicationGroup:
        """Return ``communicator``, of this backend, as a group."""
        return CommunicationGroup(name=name, backend=self.name, communicator=communicator, compression=self.compression)

    async def close(self) -> None:
        """Leave the world.  Raises what leaving it raised."""
        self.is_closing.set()
        await asyncio.wait({self.task})
        self.task.result()


async def open_in_task(name: str, backend: OpenBackend, config: BackendConfig) -> OpenedBackend:
    """Open ``backend`` in a task, which can enter and leave it whoever asks for that, and return when it is open."""
    started: asyncio.Future[Communicator] = asyncio.get_running_loop().create_future()
    is_closing = asyncio.Event()
    task = asyncio.create_task(_hold(backend, config, started, is_closing), name=f"asyncpar backend {name}")
    try:
        waited: set[asyncio.Future[None] | asyncio.Future[Communicator]] = {task, started}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if not started.done():
        started.cancel()
        task.result()
        raise AsyncparError(f"the backend {name!r} ended before it had opened")
    return OpenedBackend(
        name=name,
        communicator=started.result(),
        compression=config.compression,
        task=task,
        is_closing=is_closing,
    )


async def _hold(
    backend: OpenBackend, config: BackendConfig, started: asyncio.Future[Communicator], is_closing: asyncio.Event
) -> None:
    async with backend(config) as communicator:
        started.set_result(communicator)
        await is_closing.wait()
