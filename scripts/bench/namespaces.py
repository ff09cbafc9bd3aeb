"""Network namespaces joined by wires of given speeds: hosts, from the point of view of sockets."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
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
    left, right = (End(f"apb{side}{os.getpid()}", f"10.213.9.{place}") for place, side in ((1, "l"), (2, "r")))
    with _made(_commands(left, right, bits_per_second), [left.namespace, right.namespace]):
        yield left, right


@contextmanager
def bridge(bits_per_second: Sequence[int | None]) -> Iterator[list[End]]:
    """Make a namespace for each of the speeds, on one bridge, from which each sends at its speed (None: any).

    Raises ``NoNamespacesError`` where that is not allowed.
    """
    mark = f"{os.getpid()}{secrets.token_hex(2)}"
    hub = f"apbhub{mark}"
    ends = [End(f"apb{place}n{mark}", f"10.213.9.{place + 1}") for place in range(len(bits_per_second))]
    commands = [f"ip netns add {hub}", f"ip -n {hub} link add br0 type bridge", f"ip -n {hub} link set br0 up"]
    for place, (end, speed) in enumerate(zip(ends, bits_per_second, strict=True)):
        commands += [
            f"ip netns add {end.namespace}",
            f"ip link add {DEVICE} netns {end.namespace} type veth peer name port{place} netns {hub}",
            f"ip -n {hub} link set port{place} master br0 up",
            *_end_commands(end, speed),
        ]
    with _made(commands, [hub, *(end.namespace for end in ends)]):
        yield ends


@contextmanager
def _made(commands: Sequence[str], namespaces: Sequence[str]) -> Iterator[None]:
    """Run ``commands``, and delete ``namespaces`` in the end."""
    if os.geteuid() != 0:
        raise NoNamespacesError("making network namespaces needs root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNamespacesError(f"there is no {tool} command (iproute2)")
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode != 0:
                raise NoNamespacesError(f"{command}: {made.stderr.strip()}")
        yield
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _commands(left: End, right: End, bits_per_second: int) -> list[str]:
    names = left.namespace, right.namespace
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} netns {names[1]}")
    return [*commands, *_end_commands(left, bits_per_second), *_end_commands(right, bits_per_second)]


def _end_commands(end: End, bits_per_second: int | None) -> list[str]:
    """The bucket of the shaper is small, so that a transfer after a pause starts at the shaped speed, too."""
    within = f"ip -n {end.namespace}"
    commands = [
        f"{within} addr add {end.address}/24 dev {DEVICE}",
        f"{within} link set {DEVICE} up",
        f"{within} link set lo up",
    ]
    if bits_per_second is None:
        return commands
    burst = max(int(bits_per_second / 8 * _BURST_SECONDS), _LEAST_BURST)
    return [
        *commands,
        f"ip netns exec {end.namespace} tc qdisc add dev {DEVICE} root"
        f" tbf rate {bits_per_second}bit burst {burst} latency 20ms",
    ]
