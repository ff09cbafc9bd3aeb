"""The identity of this host: its name, its unique id, and the address that others see."""

from __future__ import annotations

import hashlib
import os
import socket
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
        parts.append(str(os.getuid()))
    return f"{name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def resolve(name: str) -> str:
    """Return the address of the host ``name``, IPv4 if it has one.  Blocks; raises ``OSError`` if it has none."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
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
