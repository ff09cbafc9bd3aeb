"""Programs for workers of Dask."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import asyncpar as ap


async def die(*_: Any, dask_worker: Any = None) -> None:
    """Kill the worker that this runs on."""
    os.kill(os.getpid(), signal.SIGKILL)


async def stop_before_start(job: str, number: int, order: bytes, on_loop: bool, dask_worker: Any = None) -> None:
    """Stop the worker of a place, and start that when the worker goes on."""
    from asyncpar.engines.dask_worker import start_place

    os.kill(os.getpid(), signal.SIGSTOP)
    await start_place(job, number, order, on_loop, dask_worker=dask_worker)


async def die_as_second(job: str, number: int, order: bytes, on_loop: bool, dask_worker: Any = None) -> None:
    """Start the first place, and kill the worker of the second."""
    from asyncpar.engines.dask_worker import start_place

    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await start_place(job, number, order, on_loop, dask_worker=dask_worker)


def return_a_lock() -> object:
    """Return what nothing carries."""
    return threading.Lock()


def wait_for_file(path: str) -> None:
    """Wait until there is a file at ``path``."""
    while not os.path.exists(path):
        time.sleep(0.02)


def count_places(dask_worker: Any = None) -> int:
    """Return how many agents a worker has."""
    return len(dask_worker.__dict__.get("_asyncpar_places", ()))


class Holder(ap.Actor):
    """Holds what it was given."""

    def __init__(self, held: list[int]) -> None:
        self._held = held

    @ap.endpoint
    async def get(self) -> list[int]:
        """Return it."""
        return self._held


class WorkerActor(ap.Actor):
    """Lives on the event loop of a worker."""

    @ap.endpoint
    async def place(self) -> list[str]:
        """Return the address of the worker, and the number of ranks that the group has counted."""
        from distributed import Worker

        total = await self.group("member").all_gather_object(1)
        (worker,) = Worker._instances  # noqa: SLF001  # as get_worker does, which is for tasks
        return [worker.address, str(sum(total))]
