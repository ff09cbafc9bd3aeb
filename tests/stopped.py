"""A process that is stopped, as by a debugger."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop_process(pid: int) -> None:
    """Stop ``pid``, and return when all its threads are stopped.

    A signal that was sent is not yet there: threads that run may answer once more.
    """
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 30.0
    while set(_states(pid)) != {"T"}:
        assert time.monotonic() < end, f"process {pid} does not stop: its threads are {_states(pid)}"
        time.sleep(0.005)


def _states(pid: int) -> list[str]:
    """Return the states of all threads, as the kernel names them: ``R`` runs, ``T`` is stopped."""
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
