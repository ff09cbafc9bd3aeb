"""Find the actor and the endpoint whose code runs, from a stack.

Nothing is kept for this while messages are handled, which makes them cheaper: the stack of a step of an actor leads
through ``Cell`` and ``Executor``, whose variables say what is being handled.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

from asyncpar.actors.runtime import cell, executor
from asyncpar.actors.runtime.calls import Delivery
from asyncpar.actors.runtime.cell import Cell

_OWN_FILES: Final = frozenset({cell.__file__, executor.__file__})
_PACKAGE: Final = str(Path(__file__).parents[2]) + os.sep


def describe_culprit(frame: FrameType) -> str | None:
    """Return whose code runs at ``frame``, which may belong to another thread; None if it is no actor's.

    Where it is asyncpar's own, as when a large result is copied, that is said, and for which actor.
    """
    user = _describe_actor(frame)
    if user is None or not frame.f_code.co_filename.startswith(_PACKAGE):
        return user
    return f"asyncpar itself ({Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}) for {user}"


def _describe_actor(frame: FrameType) -> str | None:
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
