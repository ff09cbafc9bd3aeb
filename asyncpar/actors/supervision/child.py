"""What a supervisor is told of each child, and what it tells of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.lifecycle import check_actor_class
from asyncpar.actors.runtime.registry import check_name
from asyncpar.actors.supervision.policy import Restart, parse_restart
from asyncpar.errors import UsageError


class Child:
    """How to start one child of a supervisor: its class and the arguments of its constructor.

    Every start gets the same arguments, not copies.  The child has the same ``name`` in all its lives (default: made of
    those of its supervisor and its class), so that references to it go on working.  ``restart`` is "permanent",
    "transient" or "temporary".  ``shutdown`` is how many seconds a stop may take before it becomes a kill; the default
    is 5, and no limit (``math.inf``) for a supervisor, which has children of its own to stop.

    Raises ``UsageError``.
    """

    __slots__ = ("actor_class", "args", "kwargs", "name", "restart", "shutdown")

    def __init__(
        self,
        actor_class: type[Actor],
        *args: Any,
        name: str | None = None,
        restart: Restart | str = Restart.PERMANENT,
        shutdown: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_actor_class(actor_class)
        is_number = isinstance(shutdown, int | float) and not isinstance(shutdown, bool)
        if shutdown is not None and not (is_number and shutdown >= 0.0):
            raise UsageError(f"shutdown: expected a number of seconds, 0 or more, got {shutdown!r}")
        self.actor_class = actor_class
        self.args: tuple[Any, ...] = args
        self.kwargs: Mapping[str, Any] = MappingProxyType(kwargs)
        self.name = None if name is None else check_name(name)
        self.restart = parse_restart(restart)
        self.shutdown = shutdown

    def __repr__(self) -> str:
        return f"<{self.restart} child {self.name or ''!r}: {self.actor_class.__qualname__}>"


class ChildState(StrEnum):
    """Where a child stands: it runs, is being started or stopped, waits for its restart, or stays down."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPING = "stopping"
    WAITING = "waiting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStatus:
    """One child of a supervisor.

    ``restarts`` counts its starts after the first one, for whatever reason.  ``last_failure`` says what ended it last,
    or kept it from starting; empty if nothing has.
    """

    name: str
    actor_class: str
    state: ChildState
    restarts: int
    last_failure: str


def check_children(children: object) -> tuple[Child, ...]:
    """Return the children.  Raises ``UsageError`` for what is none, and for a name that two of them have."""
    if not isinstance(children, Sequence) or isinstance(children, str):
        raise UsageError(f"children: expected a list of Child, got {children!r}")
    names: set[str] = set()
    for child in children:
        if not isinstance(child, Child):
            raise UsageError(f"children: expected a list of Child, got {child!r} in it")
        if child.name is not None and child.name in names:
            raise UsageError(f"children: expected names that differ, got {child.name!r} twice")
        names.add(child.name or "")
    return tuple(children)
