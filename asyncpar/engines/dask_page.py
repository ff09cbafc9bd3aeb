"""A page of Dask's dashboard: the jobs, the workers that they hold, and the jobs that wait."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

from tornado.web import RequestHandler

from asyncpar.engines.gangs import Gang, GangLedger


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
