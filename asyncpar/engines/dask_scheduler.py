"""The ledger of workers on Dask's scheduler, with the jobs that hold them, and the page that shows it.

Clients import this module as well, to name its functions to the scheduler, so it works without Dask, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from asyncpar.engines.gangs import GangLedger

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
    """Give back all workers of ``job``."""
    _find_ledger(dask_scheduler).release(job)


def _find_ledger(scheduler: Any) -> GangLedger:
    """Return the ledger of this cluster; the first call makes it, with its page."""
    ledger = scheduler.extensions.get(_LEDGER)
    if ledger is None:
        from asyncpar.engines.dask_plugin import ClientWatch, GangPage

        ledger = scheduler.extensions[_LEDGER] = GangLedger()
        scheduler.add_plugin(ClientWatch(ledger), name=_LEDGER)
        application = getattr(scheduler, "http_application", None)
        if application is not None:
            application.add_handlers(r".*$", [(PAGE, GangPage, {"ledger": ledger})])
    found: GangLedger = ledger
    return found
