"""Parts of Dask's scheduler for the ledger of workers: the watch for clients that leave, and the page of the dashboard.

This module imports Dask; ``dask_scheduler.py`` does not.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any, Final

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from tornado.web import RequestHandler

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


class GangPage(RequestHandler):
    """Shows the jobs of asyncpar on this cluster."""

    def initialize(self, ledger: GangLedger) -> None:
        """Set the ledger to show."""
        self._ledger = ledger

    def get(self) -> None:
        """Answer with the page."""
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.write(make_page(list(self._ledger.gangs.values()), now=time.monotonic()))


def make_page(gangs: Sequence[Gang], *, now: float) -> str:
    """Return the page, which reloads itself every two seconds."""
    rows = "".join(
        f"<tr><td>{html.escape(gang.job)}</td><td>{'runs' if gang.workers else 'waits'}</td><td>{gang.size}</td>"
        f"<td>{now - gang.since:.0f} s</td><td>{html.escape(', '.join(gang.workers))}</td></tr>"
        for gang in gangs
    )
    return (
        '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>asyncpar</title>'
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.3em 1em;text-align:left}</style>"
        "<h1>asyncpar</h1><table><tr><th>job</th><th>state</th><th>workers</th><th>since</th><th>which</th></tr>"
        f"{rows or '<tr><td colspan=5>no job</td></tr>'}</table>"
    )
