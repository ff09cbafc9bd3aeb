"""On Dask's scheduler: which job holds which workers, the page that shows it, and clients that leave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from asyncpar.engines import dask_worker
from asyncpar.engines.gangs import Gang, GangLedger

CLIENT_SECONDS: Final = 3.0
"""Seconds that a client whose connection has broken has to come back before its jobs are ended."""
_LEDGER = "asyncpar-gangs"
PAGE = "/asyncpar"


def list_workers(dask_scheduler: Any = None) -> list[str]:
    """Return the addresses of all workers that run."""
    return [address for address, state in dask_scheduler.workers.items() if state.status.name == "running"]


def ask_for_workers(
    job: str, owner: str, wanted: Sequence[str], size: int, dask_scheduler: Any = None
) -> tuple[str, ...]:
    """Return workers of a gang.  See ``GangLedger.ask``."""
    ledger = _find_ledger(dask_scheduler)
    return ledger.ask(job, owner, wanted, size, owners=dask_scheduler.clients, now=time.monotonic())


def ask_for_more(job: str, wanted: Sequence[str], count: int, dask_scheduler: Any = None) -> tuple[str, ...]:
    """Return more workers for a job that runs.  See ``GangLedger.extend``."""
    ledger = _find_ledger(dask_scheduler)
    return ledger.extend(job, wanted, count, owners=dask_scheduler.clients, now=time.monotonic())


def give_back(job: str, worker: str, dask_scheduler: Any = None) -> None:
    """Give back one worker of ``job``."""
    _find_ledger(dask_scheduler).give_back(job, worker)


def release_workers(job: str, dask_scheduler: Any = None) -> None:
    """Give back what ``job`` holds."""
    _find_ledger(dask_scheduler).release(job)


class ClientWatch(SchedulerPlugin):
    """Ends the jobs of clients that are gone: their workers would wait for them until the lease is over."""

    def __init__(self, ledger: GangLedger) -> None:
        self._ledger = ledger

    def remove_client(self, scheduler: Any, client: str) -> None:
        """See ``SchedulerPlugin``."""
        left = [gang for gang in self._ledger.gangs.values() if gang.owner == client and gang.workers]
        tasks = scheduler._ongoing_background_tasks
        if left and not tasks.closed:
            tasks.call_later(CLIENT_SECONDS, _end_jobs, scheduler, client, left)


async def _end_jobs(scheduler: Any, client: str, gangs: Sequence[Gang]) -> None:
    """End the jobs of ``client``, unless it is there again."""
    if client in scheduler.clients:
        return
    for gang in gangs:
        workers = [worker for worker in gang.workers if worker in scheduler.workers]
        call = {"op": "run", "function": dumps(dask_worker.end_job), "args": dumps((gang.job,)), "wait": True}
        await scheduler.broadcast(msg={**call, "kwargs": dumps({})}, workers=workers, on_error="ignore")


def _find_ledger(scheduler: Any) -> GangLedger:
    """Return the ledger of this cluster; the first to ask makes it, with its page."""
    ledger = scheduler.extensions.get(_LEDGER)
    if ledger is None:
        ledger = scheduler.extensions[_LEDGER] = GangLedger()
        scheduler.add_plugin(ClientWatch(ledger), name=_LEDGER)
        application = getattr(scheduler, "http_application", None)
        if application is not None:
            from asyncpar.engines.dask_page import GangPage  # it imports tornado, which comes with Dask

            application.add_handlers(r".*$", [(PAGE, GangPage, {"ledger": ledger})])
    found: GangLedger = ledger
    return found
