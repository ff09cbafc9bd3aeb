"""Two network namespaces joined by a wire of a given speed: two hosts, from the point of view of sockets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "link0"
_BURST_SECONDS = 0.8e-3
_LEAST_BURST = 16_000
_FRAME = 1514
_PAYLOAD = 1448
"""Of a full Ethernet frame, as the shaper counts it, what TCP with timestamps leaves to its user."""


class NoNamespacesError(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class End:
    """One side of the wire."""

    namespace: str
    address: str

    def enter(self, command: list[str]) -> list[str]:
        """Return ``command`` as it runs on this side."""
        return ["ip", "netns", "exec", self.namespace, *command]


def payload_rate(bits_per_second: float) -> float:
    """Return the most bytes/s that TCP can carry over a wire that is shaped to ``bits_per_second``."""
    return bits_per_second / 8 * _PAYLOAD / _FRAME


@contextmanager
def wire(bits_per_second: int) -> Iterator[tuple[End, End]]:
    """Make two namespaces and a wire, shaped in both directions; nothing is left of them afterwards.

    Raises ``NoNamespacesError`` where that is not allowed.
    """
    if os.geteuid() != 0:
        raise NoNamespacesError("making network namespaces needs root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNamespacesError(f"there is no {tool} command (iproute2)")
    left, right = (End(f"apb{side}{os.getpid()}", f"10.213.9.{place}") for place, side in ((1, "l"), (2, "r")))
    try:
        for command in _commands(left, right, bits_per_second):
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode != 0:
                raise NoNamespacesError(f"{command}: {made.stderr.strip()}")
        yield left, right
    finally:
        for end in (left, right):
            subprocess.run(["ip", "netns", "del", end.namespace], capture_output=True, check=False)


def _commands(left: End, right: End, bits_per_second: int) -> list[str]:
    """The bucket of the shaper is small, so that a transfer after a pause starts at the shaped speed, too."""
    burst = max(int(bits_per_second / 8 * _BURST_SECONDS), _LEAST_BURST)
    names = left.namespace, right.namespace
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} netns {names[1]}")
    for end in (left, right):
        within = f"ip -n {end.namespace}"
        commands += [
            f"{within} addr add {end.address}/24 dev {DEVICE}",
            f"{within} link set {DEVICE} up",
            f"{within} link set lo up",
            f"ip netns exec {end.namespace} tc qdisc add dev {DEVICE} root"
            f" tbf rate {bits_per_second}bit burst {burst} latency 20ms",
        ]
    return commands
