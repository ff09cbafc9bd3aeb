"""The identity of this host and of this process: names and unique ids."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


def host_name() -> str:
    """Return the name of this host for people: short, never empty."""
    return socket.gethostname().partition(".")[0] or "localhost"


def host_id(name: str) -> str:
    """Return an id that is equal exactly for processes that share this kernel, its network and its files."""
    parts = [name]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "mnt", "ipc")]
    except OSError:  # not Linux: the name has to suffice
        parts.append(str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", ""))
    return f"{name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """Identifies a process of one ``place``, and distinguishes it from later processes with the same number.

    ``place`` is a PID namespace of a running kernel; ``started`` the time of the start in clock ticks.
    """

    place: str
    pid: int
    started: int

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; only valid in its ``place``."""
        return self._state() in _ENDED

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger); only valid in its ``place``."""
        return self._state() in _STOPPED

    def _state(self) -> str:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return _GONE
        except PermissionError:
            return _UNKNOWN
        seen = _stat(str(self.pid))
        if seen is None:
            return _UNKNOWN
        state, started = seen
        return state if started == self.started else _GONE


_GONE = "X"
_UNKNOWN = ""
_ENDED = (_GONE, "Z")
_STOPPED = ("T", "t")
_STARTED_AT = 19


def process_mark() -> ProcessMark | None:
    """Return the mark of this process; None if ``/proc`` does not show it (not Linux, or of another namespace)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"
        is_ours = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return None
    seen = _stat("self")
    return ProcessMark(place=place, pid=os.getpid(), started=seen[1]) if is_ours and seen is not None else None


def _stat(process: str) -> tuple[str, int] | None:
    """Return state and start of a process; None if it is not shown."""
    try:
        fields = Path("/proc", process, "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[_STARTED_AT])
