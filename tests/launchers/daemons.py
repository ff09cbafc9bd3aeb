"""Run daemons, and end them with all that they have started: ``python daemons.py``.

Reads one JSON line per daemon, ``[log, program, argument, ...]``.  When its input ends, which happens however the one
who started it ends, every process below it is killed; those that daemons have left behind, or that have made themselves
a session, become its children first (``prctl(2)``, PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def kill_all() -> None:
    """Kill every process below this one, until there is none."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            os.wait()


def main() -> None:
    """Start what is asked for until nobody asks any more."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        for line in sys.stdin:
            log, *command = json.loads(line)
            with Path(log).open("ab") as file:
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    finally:
        kill_all()


if __name__ == "__main__":
    main()
