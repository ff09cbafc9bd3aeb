"""A simulated process: the data that the loop needs to run it, pause it, kill it and keep its clock."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from contextvars import Context, ContextVar
from typing import Final

CURRENT: Final[ContextVar[SimulatedProcess | None]] = ContextVar("asyncpar simulated process", default=None)
"""The running process; None in the simulator itself.  Tasks and callbacks inherit it from their maker."""


class Health(enum.Enum):
    """The operations of a simulated process."""

    RUNNING = enum.auto()
    PAUSED = enum.auto()
    DEAD = enum.auto()


class SimulatedProcess:
    """One process on ``node``: its queue of callbacks, its clock, its health.

    ``incarnation`` counts the processes of a node that have its ``role``.
    ``rate`` is how fast its clock runs; ``skew`` is added to the time
    of day only.
    """

    __slots__ = (
        "ahead",
        "blocked_until",
        "context",
        "health",
        "incarnation",
        "is_queued",
        "name",
        "node",
        "number",
        "offset",
        "rate",
        "ready",
        "role",
        "skew",
    )

    def __init__(
        self, name: str, *, number: int, node: int | None = None, incarnation: int = 0, role: str = ""
    ) -> None:
        self.name = name
        self.number = number
        self.node = node
        self.incarnation = incarnation
        self.role = role
        self.health = Health.RUNNING
        self.ready: deque[asyncio.Handle] = deque()
        self.is_queued = False
        self.rate = 1.0
        self.offset = 0.0
        self.ahead = 0.0
        """Seconds for which ``time.sleep`` has blocked it in the running callback."""
        self.blocked_until = -math.inf
        self.skew = 0.0
        self.context = Context()
        if node is not None:
            self.context.run(CURRENT.set, self)

    def local_time(self, now: float) -> float:
        """Return the time on its clock at ``now``."""
        return self.offset + now * self.rate + self.ahead

    def true_time(self, local: float) -> float:
        """Return the true time at which its clock shows ``local``."""
        return (local - self.offset) / self.rate

    @property
    def is_dead(self) -> bool:
        return self.health is Health.DEAD

    def __repr__(self) -> str:
        return f"<process {self.name} {self.health.name.lower()}>"
