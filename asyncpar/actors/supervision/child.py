"""Children of a supervisor: their declaration, their status, and the supervisor's record of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.failure import error_text
from asyncpar.actors.runtime.lifecycle import check_actor_class
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.registry import check_name
from asyncpar.actors.supervision.machine import ChildPhase, SupervisorMachine
from asyncpar.actors.supervision.policy import Restart, parse_restart
from asyncpar.errors import RemoteError, UsageError


class Child:
    """The specification of one child of a supervisor: its class and the arguments of its constructor.

    Every start gets the same arguments, not copies.  The child keeps its ``name`` across restarts (default: made of the
    names of its supervisor and its class), so that references to it stay valid.  ``restart`` is "permanent",
    "transient" or "temporary".  ``shutdown`` is the number of seconds that a stop may take before it becomes a kill;
    the default is 5, and no limit (``math.inf``) for a supervisor, which has children of its own to stop.

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
    """State of a child: running, being started or stopped, waiting for its restart, or stopped."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPING = "stopping"
    WAITING = "waiting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStatus:
    """One child of a supervisor.

    ``restarts`` counts its starts after the first one, for any reason.  ``last_failure`` is the text of its last
    failure, including a failed start; empty if there was none.
    """

    name: str
    actor_class: str
    state: ChildState
    restarts: int
    last_failure: str


def check_children(children: object) -> tuple[Child, ...]:
    """Return ``children`` as a tuple.  Raises ``UsageError`` for other objects and for names used twice."""
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


_SHUTDOWN: Final = 5.0


class ChildRecord:
    """A child across all its restarts.

    ``ref`` is the reference of its last start; ``shutdown`` is the seconds that it may take to stop, None for no limit.
    """

    __slots__ = ("child", "failure", "name", "ref", "shutdown", "starts")

    def __init__(self, name: str, child: Child, *, is_supervisor: bool) -> None:
        self.name = name
        self.child = child
        shutdown = (math.inf if is_supervisor else _SHUTDOWN) if child.shutdown is None else child.shutdown
        self.shutdown = None if shutdown == math.inf else shutdown
        self.ref: ActorRef[Any] | None = None
        self.starts = 0
        self.failure: BaseException | None = None

    def status(self, machine: SupervisorMachine) -> ChildStatus:
        """Return the status of the child, for callers."""
        return ChildStatus(
            name=self.name,
            actor_class=self.child.actor_class.__qualname__,
            state=_state(machine, self.name),
            restarts=max(0, self.starts - 1),
            last_failure="" if self.failure is None else describe_briefly(self.failure),
        )


def name_children(children: Sequence[Child], supervisor: str) -> list[str]:
    """Return a name for each child: its own, or one made of the names of its supervisor and its class."""
    taken = {child.name for child in children}
    names = []
    for child in children:
        name = base = child.name or f"{supervisor}/{child.actor_class.__name__}"
        number = 1
        while child.name is None and name in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name)
        names.append(name)
    return names


def describe_briefly(failure: BaseException) -> str:
    """Return type and text of ``failure``, without traceback."""
    if isinstance(failure, RemoteError):
        return f"{failure.type_name}: {failure.message}"
    return f"{type(failure).__name__}: {error_text(failure)}"


def _state(machine: SupervisorMachine, child: str) -> ChildState:
    match machine.phase(child):
        case ChildPhase.UP:
            return ChildState.RUNNING
        case ChildPhase.STARTING:
            return ChildState.STARTING
        case ChildPhase.STOPPING:
            return ChildState.STOPPING
        case ChildPhase.DOWN:
            return ChildState.WAITING if machine.is_wanted(child) else ChildState.STOPPED
