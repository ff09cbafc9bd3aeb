"""On Dask's scheduler: which job holds which workers, and the page of its dashboard that shows it."""

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


def release_workers(job: str, dask_scheduler: Any = None) -> None:
    """Give back what ``job`` holds."""
    _find_ledger(dask_scheduler).release(job)


def _find_ledger(scheduler: Any) -> GangLedger:
    """Return the ledger of this cluster; the first to ask makes it, with its page."""
    ledger = scheduler.extensions.get(_LEDGER)
    if ledger is None:
        ledger = scheduler.extensions[_LEDGER] = GangLedger()
        application = getattr(scheduler, "http_application", None)
        if application is not None:
            from asyncpar.engines.dask_page import GangPage  # it imports tornado, which comes with Dask

            application.add_handlers(r".*$", [(PAGE, GangPage, {"ledger": ledger})])
    found: GangLedger = ledger
    return found
