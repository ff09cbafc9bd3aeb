"""These tests look at the site that ``scripts/docs`` has built, which runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.dashboard.conftest import browser as browser
from tests.site.pages import SITE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("ASYNCPAR_TEST_SITE"):
        return
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.skip(reason="looks at the site that scripts/docs builds, and is run by it"))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site on loopback."""
    assert (SITE / "index.html").is_file()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
