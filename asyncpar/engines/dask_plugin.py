"""The watch on Dask's scheduler for clients that leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from asyncpar.engines import dask_worker
from asyncpar.engines.gangs import Gang, GangLedger

CLIENT_SECONDS: Final = 3.0
"""Seconds that a client whose connection has broken may take to come back before its jobs are ended."""


class ClientWatch(SchedulerPlugin):
    """Ends the jobs of clients that are gone: their workers would wait for them until the lease expires."""

    def __init__(self, ledger: GangLedger) -> None:
        self._ledger = ledger

    def remove_client(self, scheduler: Any, client: str) -> None:
        """See ``SchedulerPlugin``."""
        left = [gang for gang in self._ledger.gangs.values() if gang.owner == client and gang.workers]
        tasks = scheduler._ongoing_background_tasks
        if left and not tasks.closed:
            tasks.call_later(CLIENT_SECONDS, _end_jobs, scheduler, client, left)


async def _end_jobs(scheduler: Any, client: str, gangs: Sequence[Gang]) -> None:
    """End the jobs of ``client``, unless it is back."""
    if client in scheduler.clients:
        return
    for gang in gangs:
        workers = [worker for worker in gang.workers if worker in scheduler.workers]
        call = {"op": "run", "function": dumps(dask_worker.end_job), "args": dumps((gang.job,)), "wait": True}
        await scheduler.broadcast(msg={**call, "kwargs": dumps({})}, workers=workers, on_error="ignore")
