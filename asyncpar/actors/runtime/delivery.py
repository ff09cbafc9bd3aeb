"""A message that arrived at its actor, and the one that is being handled."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

import msgspec

from asyncpar.actors.runtime.endpoint import EndpointSpec
from asyncpar.actors.runtime.execution import Execution
from asyncpar.actors.runtime.streams.served import ServedStreams
from asyncpar.actors.runtime.window import message_cost
from asyncpar.errors import AsyncparError


@dataclass(slots=True, eq=False)
class Delivery:
    """A call (or tell: ``call`` is None) that arrived at its actor.

    ``deadline`` is when its caller stops waiting, in the time of this loop.
    """

    sender: int
    call: int | None
    actor: str
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]
    payload: memoryview
    deadline: float | None = None
    wants_stream: bool = False
    spec: EndpointSpec | None = field(default=None, init=False)
    """The endpoint it is for, once the actor has looked."""
    execution: Execution | None = field(default=None, init=False)
    """What runs its endpoint, while it runs."""
    streams: ServedStreams | None = field(default=None, init=False)
    """What it streams, from when its endpoint is about to run."""
    asks: set[int] | None = field(default=None, init=False)
    """The asks that its endpoint waits for."""
    is_cancelled: bool = field(default=False, init=False)
    """The caller has gone; nobody waits for the answer."""

    @property
    def title(self) -> str:
        """What it calls, for people."""
        return f"{self.endpoint if self.spec is None else self.spec.title}()"

    @property
    def cost(self) -> int:
        return message_cost(self.payload)

    def cancel(self, reason: AsyncparError) -> None:
        """Nobody waits for the answer any more: end its endpoint, or never begin it."""
        self.is_cancelled = True
        if self.streams is not None:
            self.streams.abort(reason)
        if self.execution is not None:
            self.execution.interrupt()

    def forget(self) -> None:
        """It was handled: tasks that its endpoint left behind have no deadline, and keep no arguments alive."""
        self.execution = None
        self.deadline = None
        self.arguments, self.keywords, self.payload = [], {}, memoryview(b"")


CURRENT: Final[ContextVar[Delivery | None]] = ContextVar("asyncpar delivery", default=None)
"""The message whose endpoint is running."""


def time_left() -> float | None:
    """Return the seconds until the caller of this endpoint stops waiting: 0.0 if that is over, None if it never does.

    Outside of an endpoint it is None.
    """
    current = CURRENT.get()
    if current is None or current.deadline is None:
        return None
    return max(0.0, current.deadline - asyncio.get_running_loop().time())
