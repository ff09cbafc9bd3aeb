"""Names of the lane kinds, as users write them after ``--transport`` and ``transport=``."""

from __future__ import annotations

from asyncpar.errors import UsageError

TRANSPORTS = ("shm", "tcp", "grpc")
"""Lane kinds between processes, best first.  ``shm`` joins ranks of one host: a Unix socket, and shared memory."""

HOST_TRANSPORTS = frozenset({"shm"})
"""Lane kinds that only join ranks of one host."""

IN_PROCESS_TRANSPORTS = ("inproc", *TRANSPORTS)
"""Lane kinds between ranks of one process, best first."""


MOST_CONNECTIONS = 16


def parse_connections(text: str | None) -> int:
    """Return how many connections a TCP or gRPC lane takes: what the setting says, one without it.

    Raises ``UsageError`` for anything but a whole number from 1 to 16.
    """
    if not text:
        return 1
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_CONNECTIONS):
        raise UsageError(f"ASYNCPAR_CONNECTIONS: expected 1..{MOST_CONNECTIONS}, got {text!r}")
    return int(text)


def parse_transport(name: str | None, *, known: tuple[str, ...] = TRANSPORTS) -> str | None:
    """Return the lane kind called ``name``; None, for None and the empty string: choose the best.

    Raises ``UsageError`` for an unknown name.
    """
    if not name:
        return None
    if name not in known:
        raise UsageError(f"transport: expected one of {', '.join(known)}, got {name!r}")
    return name


LINK_SECONDS = 5.0
"""How long nothing may come from a peer's host before the peer is lost, on every kind of lane between hosts."""


def parse_link_timeout(text: str | None) -> float:
    """Return for how many seconds nothing may come from a peer's host: what the setting says, 5 without it.

    Raises ``UsageError`` for anything but a whole number from 2 to 120.
    """
    if not text:
        return LINK_SECONDS
    if not (text.isascii() and text.isdecimal() and 2 <= int(text) <= 120):
        raise UsageError(f"ASYNCPAR_LINK_TIMEOUT: expected 2..120 seconds, got {text!r}")
    return float(text)


def parse_checksums(text: str | None) -> bool:
    """Return whether payloads that leave the host have checksums: unless the setting says ``off``.

    Raises ``UsageError`` for anything but ``on`` and ``off``.
    """
    if text not in {None, "", "on", "off"}:
        raise UsageError(f"ASYNCPAR_CHECKSUMS: expected on or off, got {text!r}")
    return text != "off"
