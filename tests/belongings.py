"""A process whose tests leave threads, sockets or processes behind fails its last test, and a session that leaves
processes anywhere fails.  `leftovers` ends what is left.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Generator
from typing import Any, Final

import psutil
import pytest

from tests.leftovers import MARK, find_marked

_PATIENCE = 30.0
_POLL_SECONDS = 0.1
_KEPT_THREADS: Final = re.compile("_poll_wrapper|Dask-Offload")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Generator[None]:
    """Fail the last test of this process if it has something then that it had not before the first one."""
    before = _belongings()
    yield
    _end_background()
    left = _wait_until_gone(before)
    if left:
        pytest.fail("tests have left behind:\n" + "".join(f"  {name}\n" for name in left), pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that has ended in good order and whose tests have left processes, of whatever parents."""
    if hasattr(session.config, "workerinput") or session.exitstatus not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
    ):
        return
    token = os.environ.get(MARK, "").rpartition("/")[2]
    left = [process for process in find_marked(token) if not _ends_with_its_parent(process)] if token else []
    psutil.wait_procs(left, timeout=_PATIENCE if left else 0)
    if any(process.is_running() for process in left):  # the watcher names them as it ends them
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _end_background() -> None:
    """End the loop of blocking programs, if there is one, which ends at the exit of the process otherwise."""
    module = sys.modules.get("asyncpar.blocking.thread")
    loop = module and module._background  # noqa: SLF001  # asking for it would start one
    if loop is not None:
        loop.close()


def _belongings() -> frozenset[str]:
    """Return what this process has: its threads, its sockets that have an address, and what it has started.

    Left out is what libraries make once and keep until the process ends: gRPC its thread that polls, Dask its thread
    that packs large messages, and multiprocessing its process that removes shared memory.
    """
    me = psutil.Process()
    found = {f"thread {thread.name}" for thread in threading.enumerate() if not _KEPT_THREADS.search(thread.name)}
    for socket in me.net_connections("all"):
        addresses: tuple[Any, ...] = (socket.laddr, socket.raddr)  # a path, a host and a port, or nothing
        ends = " to ".join(end if isinstance(end, str) else f"{end.ip}:{end.port}" for end in addresses if end)
        if ends:
            found.add(f"socket {ends}, descriptor {socket.fd}")
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())
            if command and not _ends_with_its_parent(child):  # without one it has ended
                found.add(f"process {child.pid}: {command}")
    return frozenset(found)


def _ends_with_its_parent(process: psutil.Process) -> bool:
    """Say whether it is the process of multiprocessing that waits for the end of the one that it serves."""
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _wait_until_gone(before: frozenset[str]) -> list[str]:
    """Return what this process has and had not ``before``, once what is about to end has ended."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        gc.collect()
        left = _belongings() - before
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(_POLL_SECONDS)
