"""Dependencies between operations, and a check that orders that respect them can be completed.  Pure.

Theory of operation.  Ranks do their operations in order and wait where something is missing.  Events are never undone,
and every wait names its event, so an operation that can run now can still run later, whatever other ranks do meanwhile:
all interleavings end in the same state.  One run in any convenient order therefore shows for every speed of ranks and
links whether all reach their end, and if not, where each of them is stuck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.operation import Content, Message, OperationKind, PipelineOp

Event = TypeVar("Event", bound=Hashable)
Orders = Sequence[Sequence[PipelineOp]]
"""The operations of each rank, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyRules(Generic[Event]):
    """``needs(operation)`` must have happened before an operation; ``makes(operation)`` happens by it, if anything."""

    needs: Callable[[PipelineOp], Sequence[Event]]
    makes: Callable[[PipelineOp], Event | None]


def computing(last_stage: int) -> DependencyRules[Message]:
    """Return the rules of computation alone: what is made anywhere is available everywhere."""

    def needs(operation: PipelineOp) -> tuple[Message, ...]:
        return needs_of(operation, last_stage)

    return DependencyRules(needs=needs, makes=lambda operation: operation.made)


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
    orders: Orders, rules: DependencyRules[Event], place_of: Callable[[int, int], str]
) -> list[tuple[int, PipelineOp, Sequence[Event]]]:
    """Return all operations as (rank, operation, what it needed), each after everything that it waits for.

    Takes time linear in the number of operations.  If they cannot all be done, raises InvalidSchedule naming the cycle
    of waits, or what is needed but never made.
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
    rules: DependencyRules[Event],
    stuck: dict[int, tuple[int, Event]],
    place_of: Callable[[int, int], str],
) -> InvalidSchedule:
    """Follow the rank that each rank waits for until one occurs again, and describe that cycle."""
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


def with_messages(order: Iterable[PipelineOp], layout: StageLayout) -> Iterator[PipelineOp]:
    """Yield ``order`` with a receive before each operation whose input comes from another rank, and a send after each
    whose output goes to one.

    Between virtual stages of the same rank nothing is sent.
    """
    for operation in order:
        yield from _messages(_received(operation.kind), operation, layout)
        yield operation
        yield from _messages(_sent(operation.kind), operation, layout)


def _received(kind: OperationKind) -> tuple[OperationKind, int] | None:
    """Return the content that an operation needs from another stage, and how many stages ahead that is."""
    if kind is OperationKind.FORWARD:
        return OperationKind.RECV_ACTIVATION, -1
    return (OperationKind.RECV_GRADIENT, +1) if kind.makes_gradient else None


def _sent(kind: OperationKind) -> tuple[OperationKind, int] | None:
    """Return the content that an operation makes for another stage, and how many stages ahead that is."""
    if kind is OperationKind.FORWARD:
        return OperationKind.SEND_ACTIVATION, +1
    return (OperationKind.SEND_GRADIENT, -1) if kind.makes_gradient else None


def _messages(
    message: tuple[OperationKind, int] | None, operation: PipelineOp, layout: StageLayout
) -> Iterator[PipelineOp]:
    if message is None:
        return
    kind, ahead = message
    neighbour = operation.stage + ahead
    if not 0 <= neighbour < layout.num_virtual_stages:
        return
    peer = layout.ranks[neighbour]
    if peer != layout.ranks[operation.stage]:
        yield PipelineOp(
            kind=kind, stage=operation.stage, micro_batch=operation.micro_batch, chunk=operation.chunk, peer=peer
        )
