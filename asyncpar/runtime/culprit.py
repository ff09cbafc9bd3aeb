"""Whose code runs: the actor and the endpoint, read off a stack.

Nothing is kept for this while messages are handled, which makes them cheaper: the stack of a step of an actor leads
through ``Cell`` and ``Handler``, whose variables say what is being handled.
"""

from __future__ import annotations

import traceback
from types import FrameType
from typing import Final

from asyncpar.runtime import cell, handler
from asyncpar.runtime.cell import Cell
from asyncpar.runtime.delivery import Delivery

_OWN_FILES: Final = frozenset({cell.__file__, handler.__file__})


def describe_culprit(frame: FrameType) -> str | None:
    """Return whose code runs at ``frame``, which may belong to another thread; None if it is no actor's."""
    for each, _ in traceback.walk_stack(frame):
        if each.f_code.co_filename not in _OWN_FILES:
            continue
        names = each.f_locals
        delivery, owner = names.get("delivery"), names.get("self")
        if isinstance(delivery, Delivery):
            return f"actor {delivery.actor!r}, endpoint {delivery.endpoint}"
        if isinstance(owner, Cell):
            return f"actor {owner.name!r}"
    return None
