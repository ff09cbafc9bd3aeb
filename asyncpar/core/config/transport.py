"""Settings of lanes, as users write them, and the costs of lanes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncpar.errors import UsageError

TRANSPORTS = ("shm", "tcp", "grpc")
"""Lane kinds between processes that come with asyncpar, best first; ``net.transport.lane_kinds`` has all."""

IN_PROCESS_TRANSPORTS = ("inproc", *TRANSPORTS)
"""Lane kinds between ranks of one process that come with asyncpar, best first."""


def split_lane_reference(text: str) -> tuple[str, str] | None:
    """Return the module and the name of ``package.module:NAME``; None for a text of another form."""
    module, colon, name = text.partition(":")
    is_one = colon and all(part.isidentifier() for part in (*module.split("."), name))
    return (module, name) if is_one else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCosts:
    """The costs of a lane: seconds of ``latency`` per message, bytes/s of ``bandwidth`` and of ``reduction``.

    ``together`` is the bytes/s that all ranks of a host send to one another at the same time; None: not known.  It is
    less than their number times ``bandwidth`` where they share too few cores.

    ``is_measured`` distinguishes figures of this machine from built-in ones, which were measured on two cores with
    Python 3.11 and which ``Communicator.calibrate`` replaces by measurements.
    """

    latency: float
    bandwidth: float
    reduction: float = 6e9
    is_measured: bool = False
    together: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth", "reduction", "together"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"{name}: expected a positive number, got {value!r}")

    def __str__(self) -> str:
        together = "" if self.together is None else f", {self.together / 1e9:.3g} GB/s together"
        source = ", measured" if self.is_measured else ""
        return f"{self.bandwidth / 1e9:.3g} GB/s, {self.latency * 1e6:.3g} us{together}{source}"


INPROC_COSTS = LaneCosts(latency=20e-6, bandwidth=6e9)
"""Cost of passing frames inside a process."""

MOST_CONNECTIONS = 16


def parse_connections(text: str | None) -> int:
    """Return the number of connections of a TCP or gRPC lane: the setting, or one without it.

    Raises ``UsageError`` for anything but a whole number from 1 to 16.
    """
    if not text:
        return 1
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_CONNECTIONS):
        raise UsageError(f"ASYNCPAR_CONNECTIONS: expected 1..{MOST_CONNECTIONS}, got {text!r}")
    return int(text)


LINK_SECONDS = 5.0
"""Seconds without any byte from a peer's host after which the peer is lost, on every lane between hosts."""


def parse_link_timeout(text: str | None) -> float:
    """Return the seconds of silence after which a peer's host is lost: the setting, or 5 without it.

    Raises ``UsageError`` for anything but a whole number from 2 to 120.
    """
    if not text:
        return LINK_SECONDS
    if not (text.isascii() and text.isdecimal() and 2 <= int(text) <= 120):
        raise UsageError(f"ASYNCPAR_LINK_TIMEOUT: expected 2..120 seconds, got {text!r}")
    return float(text)


def parse_checksums(text: str | None) -> bool:
    """Return whether payloads that leave the host carry checksums: yes, unless the setting is ``off``.

    Raises ``UsageError`` for anything but ``on`` and ``off``.
    """
    return _parse_switch("ASYNCPAR_CHECKSUMS", text, default=True)


def parse_calibrate(text: str | None) -> bool:
    """Return whether lanes are measured when ranks meet: only if the setting is ``on``.

    Raises ``UsageError`` for anything but ``on`` and ``off``.
    """
    return _parse_switch("ASYNCPAR_CALIBRATE", text, default=False)


def _parse_switch(name: str, text: str | None, *, default: bool) -> bool:
    if text not in {None, "", "on", "off"}:
        raise UsageError(f"{name}: expected on or off, got {text!r}")
    return text == "on" if text else default
