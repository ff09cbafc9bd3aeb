"""Network namespaces joined by wires of given speeds: hosts, from the point of view of sockets."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "link0"
_BURST_SECONDS = 0.8e-3
_LEAST_BURST = 16_000
_FRAME = 1514
_NOWHERE = "02:00:00:00:00:01"
"""A link-layer address that nobody has."""

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
    with _made(_bridge_commands(hub, ends, bits_per_second), [hub, *(end.namespace for end in ends)]):
        yield ends


class Hosts:
    """Namespaces on one bridge that this process reaches, too, and whose ways to each other can be cut.

    Made by ``hosts``.  Cuts are silent: nobody is told that what is sent gets lost.
    """

    def __init__(self, hub: str, ends: Mapping[str, End]) -> None:
        self.ends = ends
        self._hub = hub

    def pull(self, name: str) -> None:
        """Take the link of a host down: nothing gets from it to others, nor from others to it."""
        self._set_port(name, "down")

    def mute(self, name: str) -> None:
        """Let nothing get from a host to the others, which it still hears."""
        for other in self.ends:
            if other != name:
                self._lose(name, other)

    def deafen(self, name: str) -> None:
        """Let nothing get from the others to a host, which they still hear."""
        for other in self.ends:
            if other != name:
                self._lose(other, name)

    def heal(self, name: str) -> None:
        """End all cuts around a host."""
        self._set_port(name, "up")
        for other in self.ends:
            for source, target in ((name, other), (other, name)):
                if source != target:
                    self._neighbour("del", source, target, check=False)

    def _set_port(self, name: str, state: str) -> None:
        command = f"ip -n {self._hub} link set port{list(self.ends).index(name)} {state}"
        subprocess.run(command.split(), capture_output=True, check=True)

    def _lose(self, source: str, target: str) -> None:
        self._neighbour("replace", source, target, "lladdr", _NOWHERE, "nud", "permanent", check=True)

    def _neighbour(self, verb: str, source: str, target: str, *more: str, check: bool) -> None:
        within, address = self.ends[source].namespace, self.ends[target].address
        command = ["ip", "-n", within, "neigh", verb, address, *more, "dev", DEVICE]
        subprocess.run(command, capture_output=True, check=check)


@contextmanager
def hosts(names: Sequence[str], bits_per_second: int | None = None) -> Iterator[Hosts]:
    """Make a namespace for each of the hosts, on one bridge that this process can reach, too.

    Each host sends and hears at ``bits_per_second`` (None: any).
    Raises ``NoNamespacesError`` where that is not allowed.
    """
    mark = f"{os.getpid()}{secrets.token_hex(2)}"
    hub, door, net = f"apbhub{mark}", f"apb{mark}", f"10.214.{os.getpid() % 256}"
    ends = [End(f"apb{place}n{mark}", f"{net}.{place + 1}") for place in range(len(names))]
    commands = [
        *_bridge_commands(hub, ends, [bits_per_second] * len(ends)),
        *(_shape(hub, f"port{place}", bits_per_second) for place in range(len(ends)) if bits_per_second is not None),
        f"ip link add {door} type veth peer name door netns {hub}",
        f"ip -n {hub} link set door master br0 up",
        f"ip addr add {net}.254/24 dev {door}",
        f"ip link set {door} up",
    ]
    with _made(commands, [hub, *(end.namespace for end in ends)]):
        yield Hosts(hub, dict(zip(names, ends, strict=True)))


def _bridge_commands(hub: str, ends: Sequence[End], bits_per_second: Sequence[int | None]) -> list[str]:
    commands = [f"ip netns add {hub}", f"ip -n {hub} link add br0 type bridge", f"ip -n {hub} link set br0 up"]
    for place, (end, speed) in enumerate(zip(ends, bits_per_second, strict=True)):
        commands += [
            f"ip netns add {end.namespace}",
            f"ip link add {DEVICE} netns {end.namespace} type veth peer name port{place} netns {hub}",
            f"ip -n {hub} link set port{place} master br0 up",
            *_end_commands(end, speed),
        ]
    return commands


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
        with _uninterrupted():
            for name in namespaces:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: namespaces that are left behind stay until the machine ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    return commands if bits_per_second is None else [*commands, _shape(end.namespace, DEVICE, bits_per_second)]


def _shape(namespace: str, device: str, bits_per_second: int) -> str:
    burst = max(int(bits_per_second / 8 * _BURST_SECONDS), _LEAST_BURST)
    shaper = f"tbf rate {bits_per_second}bit burst {burst} latency 20ms"
    return f"ip netns exec {namespace} tc qdisc add dev {device} root {shaper}"
