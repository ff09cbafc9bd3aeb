"""The identity of this host and of this process: names, unique ids, the address that others see."""

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
    """Return what is equal exactly for processes that share this kernel, its network and its files."""
    parts = [name]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "mnt", "ipc")]
    except OSError:  # not Linux: the name has to do
        parts.append(str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", ""))
    return f"{name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def resolve(name: str) -> str:
    """Return the address of the host ``name``, IPv4 if it has one.  Blocks; raises ``OSError`` if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label is empty or too long: nothing has such a name
        raise socket.gaierror(socket.EAI_NONAME, f"no name of a host: {error}") from error
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    return addresses[0]


def route_to(address: str, port: int) -> str:
    """Return the address of this host that packets to ``address`` carry.  Sends nothing.

    Raises ``OSError`` when there is no way there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """Identifies a process among those of one ``place``, also from later processes with the same number.

    ``place`` is a PID namespace of a running kernel; ``started`` the time of the start in clock ticks.
    """

    place: str
    pid: int
    started: int

    @property
    def has_ended(self) -> bool:
        """Has the process ended?  Ask in its place."""
        return self._state() in _ENDED

    @property
    def is_stopped(self) -> bool:
        """Has the process been stopped (SIGSTOP, a debugger)?  Ask in its place."""
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
    """Return the mark of this process; None where ``/proc`` does not show it (not Linux, or of another namespace)."""
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
