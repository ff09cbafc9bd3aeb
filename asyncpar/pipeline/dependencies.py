"""What has to be done before what, and whether orders can be run to their end at all.  Pure.

Theory of operation.  Ranks do their operations in order and wait where something is missing.  What has happened stays
so, and every wait names what it waits for, so an operation that can run now can still run later, whatever other ranks
do meanwhile: all interleavings end in the same state.  One run in any convenient order therefore shows for every speed
of ranks and links whether all come to their end, and if not, where each of them is stuck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.operation import Content, Message, OperationKind, PipelineOp

Event = TypeVar("Event", bound=Hashable)
Orders = Sequence[Sequence[PipelineOp]]
"""What each rank does, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Generic[Event]):
    """``needs(operation)`` must have happened before an operation; ``makes(operation)`` happens by it, if anything."""

    needs: Callable[[PipelineOp], Sequence[Event]]
    makes: Callable[[PipelineOp], Event | None]


def computing(last_stage: int) -> Rules[Message]:
    """Return the rules of what is computed: what is made anywhere is there for all."""

    def needs(operation: PipelineOp) -> tuple[Message, ...]:
        return needs_of(operation, last_stage)

    return Rules(needs=needs, makes=lambda operation: operation.made)


def needs_of(operation: PipelineOp, last_stage: int) -> tuple[Message, ...]:
    """Return all that has to be computed before a compute operation; stages are 0 .. last_stage."""
    stage, micro_batch = operation.stage, operation.micro_batch
    match operation.kind:
        case OperationKind.FORWARD:
            return (Message(stage - 1, Content.ACTIVATION, micro_batch),) if stage > 0 else ()
        case OperationKind.BACKWARD | OperationKind.BACKWARD_INPUT:
            own = Message(stage, Content.ACTIVATION, micro_batch)
            return (own, Message(stage + 1, Content.GRADIENT, micro_batch)) if stage < last_stage else (own,)
        case OperationKind.BACKWARD_WEIGHT:
            return (Message(stage, Content.GRADIENT, micro_batch),)
    raise AssertionError(f"{operation} is not computed")


def in_order_of_need(
    orders: Orders, rules: Rules[Event], place_of: Callable[[int, int], str]
) -> list[tuple[int, PipelineOp, Sequence[Event]]]:
    """Return all operations as (rank, operation, what it needed), each behind all that it waits for.

    Takes time linear in the number of operations.  Raises InvalidSchedule, naming who waits for what in a circle, if
    they cannot all be done, or what is needed but made by none.
    """
    done: list[tuple[int, PipelineOp, Sequence[Event]]] = []
    made: set[Event] = set()
    waiting: defaultdict[Event, list[int]] = defaultdict(list)
    missing: dict[int, Event] = {}
    position = [0] * len(orders)
    ready = list(reversed(range(len(orders))))
    while ready:
        rank = ready.pop()
        missing.pop(rank, None)
        order = orders[rank]
        while position[rank] < len(order):
            operation = order[position[rank]]
            needed = rules.needs(operation)
            absent = next((event for event in needed if event not in made), None)
            if absent is not None:
                waiting[absent].append(rank)
                missing[rank] = absent
                break
            done.append((rank, operation, needed))
            position[rank] += 1
            event = rules.makes(operation)
            if event is not None:
                made.add(event)
                ready += waiting.pop(event, ())
    if missing:
        stuck = {rank: (position[rank], event) for rank, event in missing.items()}
        raise _deadlock(orders, rules, stuck, place_of)
    return done


def _deadlock(
    orders: Orders,
    rules: Rules[Event],
    stuck: dict[int, tuple[int, Event]],
    place_of: Callable[[int, int], str],
) -> InvalidSchedule:
    """Follow who waits for whom until a rank comes again, and describe that circle."""
    makers = {
        rules.makes(operation): (rank, action)
        for rank, order in enumerate(orders)
        for action, operation in enumerate(order)
    }
    path, rank = list[int](), min(stuck)
    while rank not in path:
        path.append(rank)
        action, event = stuck[rank]
        if event not in makers:
            fault = f"{place_of(rank, action)} waits for {event}, which nobody gives"
            return InvalidSchedule(fault, rank=rank, operation=orders[rank][action])
        rank = makers[event][0]
    circle = path[path.index(rank) :]
    waits = [f"{place_of(one, stuck[one][0])} waits for {place_of(*makers[stuck[one][1]])}" for one in circle]
    ending = ", which stands behind it" if len(circle) == 1 else ""
    first = circle[0]
    return InvalidSchedule(
        f"deadlock: {'; '.join(waits)}{ending}", rank=first, operation=orders[first][stuck[first][0]]
    )
