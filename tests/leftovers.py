"""Nothing that a test starts outlives the tests, however they end: passed, failed, at Ctrl-C or by SIGKILL.

Theory of operation.  A session marks its environment, which all processes that tests start inherit, whichever their
parents are and whatever session or process group they make.  A watcher, a process of its own, waits for the end of the
session on a pipe, which comes however the session ends, and kills what carries the mark.  A session within a session
adds to the mark, so that the outer one finds what both have started.

This file is the watcher, too: ``python -I leftovers.py TOKEN``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    import pytest

MARK: Final = "TESTS_THAT_STARTED_THIS"
_REAPING_SECONDS: Final = 1.0
"""What reapers of launchers and agents have to remove files of those that were killed."""

_PATIENCE: Final = 30.0
_SHOWN: Final = 8

_watchers: list[tuple[pytest.Config, subprocess.Popen[bytes], str | None]] = []
"""This session, its watcher, and the mark before it."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or _watchers:  # a worker has the mark of its session
        return
    token, before = uuid.uuid4().hex, os.environ.get(MARK)
    watcher = subprocess.Popen([sys.executable, "-I", __file__, token], stdin=subprocess.PIPE, start_new_session=True)
    _watchers.append((config, watcher, before))
    os.environ[MARK] = f"{before or ''}/{token}"


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _watchers or _watchers[0][0] is not config:
        return
    _, watcher, before = _watchers.pop()
    os.environ.pop(MARK)
    if before is not None:
        os.environ[MARK] = before
    watcher.communicate(timeout=2 * _PATIENCE)


def find_marked(token: str) -> list[psutil.Process]:
    """Return the processes that the session of ``token`` has started, directly or not."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
        except (psutil.Error, OSError):  # it has just ended, or is of another user
            continue
        if token in mark and process.pid != os.getpid():
            found.append(process)
    return found


def end_all(token: str) -> list[str]:
    """Kill all processes of the session of ``token``, and return their command lines."""
    names = []
    deadline, spares_reapers = time.monotonic() + _PATIENCE, True
    while (found := find_marked(token)) and time.monotonic() < deadline:
        killed = []
        for process in found:
            try:
                command = process.cmdline()
                if spares_reapers and any(word.endswith("reaper.py") for word in command):
                    continue
                process.kill()
            except psutil.Error:
                continue
            killed.append(process)
            names.append(" ".join(command))
        psutil.wait_procs(killed, timeout=_REAPING_SECONDS)
        if spares_reapers:
            psutil.wait_procs(found, timeout=_REAPING_SECONDS)
        spares_reapers = False
    return names


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    names = end_all(sys.argv[1])
    if names:
        shown = "".join(f"  {name}\n" for name in names[:_SHOWN])
        more = f"  and {len(names) - _SHOWN} more\n" if len(names) > _SHOWN else ""
        sys.stderr.write(f"tests had left {len(names)} processes, which were killed:\n{shown}{more}")


if __name__ == "__main__":
    main()
