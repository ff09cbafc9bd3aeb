"""The actors of one rank by name or by stack, the ends of former ones, and the actor classes of this process."""

from __future__ import annotations

import reprlib
import traceback
from collections import OrderedDict
from types import FrameType
from typing import Any, Final

from asyncpar.actors.runtime import cell, executor, message
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.calls import Delivery
from asyncpar.actors.runtime.cell import Cell
from asyncpar.errors import UsageError

MAX_NAME: Final = 255
_MOST_EXIT_REASONS: Final = 1000
_STEPS_OF_ACTORS: Final = frozenset({cell.__file__, executor.__file__})


class ActorRegistry:
    """Cells by name, oldest first."""

    def __init__(self, rank: int) -> None:
        self.cells: dict[str, Cell] = {}
        self.is_closing = False
        """Whether the node is closing, so that missing actors count as closed."""
        self.rank = rank
        self._exit_reasons: OrderedDict[str, str] = OrderedDict()
        self._names = 0

    def new_name(self, name: str | None, actor_class: type[Any]) -> str:
        """Return ``name``, or a new one for an actor of ``actor_class``.  Raises ``UsageError`` if it is taken."""
        if name is None:
            while True:
                self._names += 1
                own_name = f"{actor_class.__name__}-{self._names}"
                if own_name not in self.cells:  # a caller may have given an actor this name
                    return own_name
        check_name(name)
        if name in self.cells:
            raise UsageError(f"name: {name!r} is taken by another actor on rank {self.rank}")
        return name

    def add(self, cell: Cell) -> None:
        """Register ``cell`` under its name."""
        self.cells[cell.name] = cell
        self._exit_reasons.pop(cell.name, None)

    def remove(self, cell: Cell) -> None:
        """Remove ``cell``, which has ended; keep its exit reason among the last thousand."""
        del self.cells[cell.name]
        self._exit_reasons[cell.name] = cell.ending.exit_reason
        if len(self._exit_reasons) > _MOST_EXIT_REASONS:
            self._exit_reasons.popitem(last=False)

    def exit_reason(self, name: str) -> str | None:
        """Return the exit reason of the actor called ``name``; None if no such actor is known."""
        return self._exit_reasons.get(name)

    def absence(self, name: str) -> tuple[str, str]:
        """Return the reason and the text of a failure because there is no actor called ``name``."""
        if self.is_closing:
            return message.CLOSED, "the node was closed"
        exit_reason = self._exit_reasons.get(name)
        if exit_reason is not None:
            return message.STOPPED, exit_reason
        return message.ABSENT, f"there is no actor {name!r} on rank {self.rank}"


def check_name(name: object) -> str:
    """Return ``name``; raise ``UsageError`` unless it can be a name."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise UsageError(f"name: expected 1 to {MAX_NAME} printable characters, got {reprlib.repr(name)}")
    return name


def class_path(actor_class: type[Actor]) -> str:
    """Return ``module:qualified name``, by which other ranks find the class."""
    return f"{actor_class.__module__}:{actor_class.__qualname__}"


def find_actor_class(path: str) -> type[Actor]:
    """Return the subclass of ``Actor`` at ``path``, the newest if it was defined again.

    Raises ``UsageError`` if this process knows none.
    """
    found = None
    waiting: list[type[Actor]] = [Actor]
    seen: set[type[Actor]] = set()
    while waiting:
        for kind in waiting.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                if class_path(kind) == path:
                    found = kind
    if found is None:
        raise UsageError(f"actor class: {path} is not known to this rank; import its module there before the spawn")
    return found


def describe_actor(frame: FrameType) -> str | None:
    """Return the actor and the endpoint whose code runs in ``frame``, perhaps of another thread; None if there is none.

    No record is kept of handled messages, but the stack of a step of an actor goes through ``Cell`` and ``Executor``,
    whose variables name the message.
    """
    for each, _ in traceback.walk_stack(frame):
        if each.f_code.co_filename not in _STEPS_OF_ACTORS:
            continue
        names = each.f_locals
        delivery, owner = names.get("delivery"), names.get("self")
        if isinstance(delivery, Delivery):
            return f"actor {delivery.actor!r}, endpoint {delivery.endpoint}"
        if isinstance(owner, Cell):
            return f"actor {owner.name!r}"
    return None
