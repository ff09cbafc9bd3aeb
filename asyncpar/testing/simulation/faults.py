"""Faults as data: their kinds, drawing them from a seed, and checking them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from asyncpar.errors import UsageError

_ON_A_NODE: Final = {
    "kill": "the process dies; its machine resets its connections",
    "crash": "the machine goes off for `seconds` (None: for good); what was not synced is lost",
    "restart": "the process dies if it lives, and a new one starts",
    "kill_agent": "the agent of the node dies, and its ranks with it",
    "leave": "the agent of the node gets SIGTERM: its ranks leave at the end of a step, and it ends",
    "pause": "the processes of the node get no processor for `seconds` (SIGSTOP)",
    "pause_agent": "the agent of the node gets no processor for `seconds`",
    "pause_rank": "the rank on the node gets no processor for `seconds`",
    "isolate": "nothing gets from the node to others, nor back, for `seconds`",
    "clock": "its clock runs `factor` times as fast from now on",
    "jump": "its time of day changes by `seconds`",
    "disk": "its disk fails for `seconds`",
}
_BETWEEN_NODES: Final = {
    "reset": "connections between the two break, and both learn it",
    "half_open": "connections between the two break, and only `node` learns it",
    "silence": "nothing gets from one to the other, both ways, for `seconds`",
    "one_way": "nothing gets from `node` to `peer` for `seconds`",
    "clog": "what `node` sends to `peer` waits for `seconds`, unnoticed",
    "slow": "what `node` sends to `peer` takes `factor` times as long for `seconds`",
    "replay": "`peer` gets something again that `node` has sent it before",
    "damage": "a bit changes in something that `node` sends to `peer`",
}
KINDS: Final = {**_ON_A_NODE, **_BETWEEN_NODES}
"""All kinds of faults, with their meaning."""

NEED_SECONDS: Final = frozenset(
    {"pause", "pause_agent", "pause_rank", "isolate", "jump", "disk", "silence", "one_way", "clog", "slow"}
)
NEED_FACTOR: Final = frozenset({"clock", "slow"})

DRAWN: Final = (
    "kill",
    "crash",
    "pause",
    "isolate",
    "reset",
    "half_open",
    "silence",
    "one_way",
    "clog",
    "slow",
    "clock",
)
"""The kinds that are drawn by default."""

_LONGEST_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault ``at`` a virtual time; ``KINDS`` explains each kind.

    ``peer``: the other node, for faults between two; ``seconds``: the duration; ``factor``: the magnitude.
    """

    at: float
    kind: str
    node: int
    peer: int | None = None
    seconds: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0.0 <= self.at < float("inf"):
            raise UsageError(f"at: expected a virtual time in seconds, 0 or later, got {self.at!r}")
        if (self.peer is not None) != (self.kind in _BETWEEN_NODES):
            raise UsageError(f"peer: expected {'a node' if self.peer is None else 'None'} for {self.kind}")
        if self.peer == self.node:
            raise UsageError(f"peer: expected another node than {self.node}, for {self.kind}")
        if self.kind in NEED_SECONDS and self.seconds is None:
            raise UsageError(f"seconds: expected a number for {self.kind}, got None")
        if self.kind in NEED_FACTOR and not (self.factor and self.factor > 0.0):
            raise UsageError(f"factor: expected a positive number for {self.kind}, got {self.factor!r}")
        if self.kind != "jump" and self.seconds is not None and not self.seconds > 0.0:
            raise UsageError(f"seconds: expected a positive number for {self.kind}, got {self.seconds!r}")

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that it affects."""
        return (self.node,) if self.peer is None else (self.node, self.peer)

    def __repr__(self) -> str:
        fields = {"at": self.at, "kind": self.kind, "node": self.node}
        fields |= {
            name: getattr(self, name) for name in ("peer", "seconds", "factor") if getattr(self, name) is not None
        }
        return f"Fault({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def check_faults(faults: Iterable[object], size: int) -> tuple[Fault, ...]:
    """Return ``faults`` in the order of their times.  Raises ``UsageError`` for invalid ones, and for unknown nodes."""
    checked = []
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"faults: expected Fault(...) or a number of faults to draw, got {fault!r}")
        for node in fault.nodes:
            if not 0 <= node < size:
                raise UsageError(f"faults: expected nodes 0..{size - 1}, got {node} in {fault!r}")
        checked.append(fault)
    return tuple(sorted(checked, key=lambda fault: fault.at))


def draw_faults(
    seed: object, *, count: int, size: int, within: float, kinds: Sequence[str] = DRAWN
) -> tuple[Fault, ...]:
    """Return ``count`` faults of ``kinds`` in the first ``within`` seconds; the same for the same arguments."""
    dice = Random(f"{seed} faults")
    kinds = [kind for kind in kinds if size > 1 or kind not in _BETWEEN_NODES]
    drawn = []
    for _ in range(count):
        kind = dice.choice(kinds)
        node = dice.randrange(size)
        peer = (node + dice.randrange(1, size)) % size if kind in _BETWEEN_NODES else None
        lasts = kind in NEED_SECONDS or (kind == "crash" and dice.random() < 1 / 2)
        seconds = _LONGEST_SECONDS * dice.random() ** 4 + 1e-4 if lasts else None
        factor = None
        if kind == "clock":
            factor = round(dice.uniform(0.8, 1.25), 3)
        elif kind == "slow":
            factor = round(10 ** dice.uniform(0.5, 3.0), 1)
        at = round(dice.random() * within, 6)
        if seconds is not None:
            seconds = round(seconds, 4)
        drawn.append(Fault(at=at, kind=kind, node=node, peer=peer, seconds=seconds, factor=factor))
    return check_faults(drawn, size)
