"""Operations whose data goes one way, from a root or to it, and that end only when every rank is known to be in them.

Theory of operation.  Where data goes one way, a rank that only sends would be over before the others have come, and
would never hear that one of them calls something else: with two roots, each would take its own data for everyone's.  So
messages without payload, which carry the fingerprint of the operation as all do, go the other way: *up* a binomial tree
to the root before data comes down, or *down* again when data has come up.  A message comes from a rank only when
everybody behind it has come, so who gets it knows of all of them; and who calls something else is found by a neighbour,
which tells everyone.  Two ranks have only each other to know of: there nobody waits before data moves.

Data of one piece, which all small data is, and these messages are one plan (``confirmed``).  Otherwise they are a plan
of their own, run before or after that of the data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Literal

from asyncpar.collectives.algorithms.steps import Schedule, emptied
from asyncpar.collectives.engine import Engine, OperationPlan
from asyncpar.collectives.execute import InPlace, execute
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import AlongBuffer, Layout, Plan
from asyncpar.collectives.protocol import describe

_PHASE: Final = 7
"""After those of the data: calibration has most."""

Transfer = Callable[[], Awaitable[None]]
Way = Literal["from root", "to root"]

_AGAINST: Final[dict[Way, str]] = {"from root": "reduce", "to root": "broadcast"}
"""The operation that sends in the other direction."""


def confirmed(engine: Engine, schedule: Schedule, layout: Layout, root: int, way: Way) -> Schedule:
    """Return ``schedule``, in which data goes ``way``, together with the messages without payload if it is one piece.

    ``from_root`` and ``to_root`` run a plan of the result, whose number of pieces is the same on all ranks.
    """
    if layout.pieces > 1 or engine.size == 1:
        return schedule
    data, nothing = schedule.rounds, emptied(engine.schedule(_AGAINST[way], "tree", root).rounds)
    if engine.size == 2:
        rounds = tuple(here + there for here, there in zip(nothing, data, strict=True))
    else:
        rounds = (*nothing, *data) if way == "from root" else (*data, *nothing)
    return replace(schedule, rounds=rounds)


async def from_root(engine: Engine, operation: Operation, root: int, plan: Plan, transfer: Transfer) -> None:
    """Run ``transfer``, in which data goes from ``root`` to the others; all ranks are in ``operation`` then.

    ``plan`` is the first one that it runs, of a schedule that was ``confirmed``.
    """
    if plan.pieces == 1:
        await transfer()
        return
    if engine.size == 2 and engine.rank == root:
        await transfer()
        await _pass_nothing(engine, operation, root, "reduce")
        return
    await _pass_nothing(engine, operation, root, "reduce")
    await transfer()


async def to_root(engine: Engine, operation: Operation, root: int, plan: Plan, transfer: Transfer) -> None:
    """Run ``transfer``, in which data goes from the others to ``root``; all ranks are in ``operation`` then.

    ``plan`` is the one that it runs, of a schedule that was ``confirmed``.
    """
    if plan.pieces == 1:
        await transfer()
        return
    if engine.size == 2 and engine.rank == root:
        await _pass_nothing(engine, operation, root, "broadcast")
        await transfer()
        return
    await transfer()
    await _pass_nothing(engine, operation, root, "broadcast")


async def _pass_nothing(engine: Engine, operation: Operation, root: int, way: str) -> None:
    """Send and receive what ``way`` does in a tree, without payload."""
    if engine.size > 1:
        prepared = engine.prepared(("nothing", way, root), lambda: _prepare(engine, root, way))
        await execute(operation, prepared.messages, InPlace())


def _prepare(engine: Engine, root: int, way: str) -> OperationPlan:
    nothing = AlongBuffer(count=0, chunks=1, itemsize=1)
    schedule = engine.schedule(way, "tree", root)
    return OperationPlan(
        description=describe("nothing", (), "tree"),
        messages=engine.bind(schedule, nothing, phase=_PHASE),
    )
