"""What a supervisor knows of one child beyond what its machine does: how it is started, its reference, its past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from asyncpar.actors.runtime.failure import error_text
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.supervision.child import Child, ChildState, ChildStatus
from asyncpar.actors.supervision.machine import Standing, SupervisorMachine
from asyncpar.errors import RemoteError

_SHUTDOWN: Final = 5.0


class Life:
    """All lives of one child.

    ``ref`` is the reference that belongs to the last one, ``shutdown`` how long it may take to stop, None for ever.
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
        """Return what others may know."""
        return ChildStatus(
            name=self.name,
            actor_class=self.child.actor_class.__qualname__,
            state=_state(machine, self.name),
            restarts=max(0, self.starts - 1),
            last_failure="" if self.failure is None else describe(self.failure),
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


def describe(failure: BaseException) -> str:
    """Return type and text of ``failure``, without traceback."""
    if isinstance(failure, RemoteError):
        return f"{failure.type_name}: {failure.message}"
    return f"{type(failure).__name__}: {error_text(failure)}"


def _state(machine: SupervisorMachine, child: str) -> ChildState:
    match machine.standing(child):
        case Standing.UP:
            return ChildState.RUNNING
        case Standing.STARTING:
            return ChildState.STARTING
        case Standing.STOPPING:
            return ChildState.STOPPING
        case Standing.DOWN:
            return ChildState.WAITING if machine.is_wanted(child) else ChildState.STOPPED
