"""Files that processes have left in /dev/shm, distinguished from those of other jobs that run meanwhile."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")


def shared_files() -> set[str]:
    """Return the names of the files (not folders) in /dev/shm."""
    return {path.name for path in _FOLDER.iterdir() if _is_file(path)}


def left_behind(before: set[str], *, seconds: float = 2.0) -> set[str]:
    """Return the files that are new since ``before`` and that no living process has open or mapped.

    Files of jobs that still run are in use, or soon removed: it looks again for up to ``seconds``.  Call it when all
    processes that should have left nothing are gone.
    """
    end = time.monotonic() + seconds
    left = shared_files() - before
    while left:
        left = (left & shared_files()) - _in_use()
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return left


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _in_use() -> set[str]:
    """Return the names of the files in /dev/shm that a process has open or mapped."""
    found: set[str] = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it ended while we looked, or is somebody else's
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            found |= {Path(line.split(maxsplit=5)[5]).name for line in lines if f" {_FOLDER}/" in line}
            for name in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):  # it was closed while we looked
                    path = Path(os.readlink(f"/proc/{process}/fd/{name}"))
                    found |= {path.name} if path.parent == _FOLDER else set()
    return found
