"""Check that a schedule can be run: each action occurs once, on its rank, and no rank waits forever.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from asyncpar.errors import UsageError
from asyncpar.pipeline.dependencies import DependencyRules, Orders, computing, in_order_of_need, needs_of, with_messages
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.operation import Message, OperationKind, PipelineOp
from asyncpar.pipeline.schedule import PipelineSchedule, Schedule

_BACKWARDS = (OperationKind.BACKWARD, OperationKind.BACKWARD_INPUT, OperationKind.BACKWARD_WEIGHT)
_Found = dict[tuple[int, OperationKind, int], tuple[int, int]]
"""The rank and the position of each action, by stage, kind and micro-batch."""


def check_schedule(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless every rank reaches its end and everything is computed exactly once.

    This proves: every action is on the rank of its stage; every virtual stage has, for each micro-batch, one forward
    and one backward pass, whole or in two halves; and no rank waits forever, whatever the speeds of ranks and links,
    even if receives block (``check_blocking``).  Takes time linear in the number of operations; built-in schedules are
    checked only once.
    """
    if isinstance(schedule, PipelineSchedule):
        _check_built_in(schedule)
    else:
        _check(schedule)


@lru_cache(maxsize=1024)
def _check_built_in(schedule: PipelineSchedule) -> None:
    _check(schedule)


def _check(schedule: Schedule) -> None:
    if schedule.num_stages != schedule.layout.num_stages:
        raise UsageError(
            f"{schedule.name}: num_stages: expected {schedule.layout.num_stages} as in the layout, "
            f"got {schedule.num_stages}"
        )
    orders = [schedule.compute_order(rank) for rank in range(schedule.num_stages)]
    found = _check_places(schedule, orders)
    for stage in range(schedule.num_virtual_stages):
        for micro_batch in range(schedule.num_microbatches):
            _check_passes(schedule, found, stage, micro_batch)
    try:
        check_blocking(schedule)
    except InvalidSchedule:
        # If the orders themselves are at fault, the error is in terms of what users write.
        in_order_of_need(orders, computing(schedule.num_virtual_stages - 1), schedule.place_of)
        raise


def _check_places(schedule: Schedule, orders: Orders) -> _Found:
    found: _Found = {}
    layout = schedule.layout
    for rank, order in enumerate(orders):
        for action, operation in enumerate(order):
            fault = _misplaced(operation, rank, layout, schedule.num_microbatches)
            key = (operation.stage, operation.kind, operation.micro_batch)
            if not fault and key in found:
                fault = f"the same action is there before: {schedule.place_of(*found[key])}"
            if fault:
                place = schedule.place_of(rank, action)
                raise InvalidSchedule(f"{place}: {fault}", rank=rank, operation=operation)
            found[key] = (rank, action)
    return found


def _misplaced(operation: PipelineOp, rank: int, layout: StageLayout, micro_batches: int) -> str | None:
    if not operation.kind.is_compute:
        return f"kind: expected what is computed (sends and receives are added), got {operation.kind}"
    if not 0 <= operation.stage < layout.num_virtual_stages:
        return f"stage: expected 0..{layout.num_virtual_stages - 1}, got {operation.stage}"
    if not 0 <= operation.micro_batch < micro_batches:
        return f"micro_batch: expected 0..{micro_batches - 1}, got {operation.micro_batch}"
    owner, chunk = layout.ranks[operation.stage], layout.chunks[operation.stage]
    if owner != rank:
        return f"wrong rank: stage {operation.stage} belongs to rank {owner}, not to rank {rank}"
    return None if operation.chunk == chunk else f"chunk: expected {chunk}, got {operation.chunk}"


def _check_passes(schedule: Schedule, found: _Found, stage: int, micro_batch: int) -> None:
    rank = schedule.rank_of(stage)
    present = [kind for kind in _BACKWARDS if (stage, kind, micro_batch) in found]
    if OperationKind.BACKWARD in present and len(present) > 1:
        whole, half = (found[stage, kind, micro_batch] for kind in present[:2])
        raise InvalidSchedule(
            f"{schedule.place_of(*half)}: the whole backward pass is there as well: {schedule.place_of(*whole)}",
            rank=rank,
            operation=schedule.compute_order(rank)[half[1]],
        )
    for kind in _missing(present, has_forward=(stage, OperationKind.FORWARD, micro_batch) in found):
        absent = PipelineOp(kind=kind, stage=stage, micro_batch=micro_batch, chunk=schedule.chunk_of(stage))
        raise InvalidSchedule(
            f"{schedule.row_of(rank)}: missing action: {absent} is never done", rank=rank, operation=absent
        )


def _missing(backwards: Sequence[OperationKind], *, has_forward: bool) -> Iterator[OperationKind]:
    if not has_forward:
        yield OperationKind.FORWARD
    if not backwards:
        yield OperationKind.BACKWARD
    elif backwards == [OperationKind.BACKWARD_INPUT]:
        yield OperationKind.BACKWARD_WEIGHT
    elif backwards == [OperationKind.BACKWARD_WEIGHT]:
        yield OperationKind.BACKWARD_INPUT


class _MessageState(StrEnum):
    MADE = "made"
    SENT = "sent"
    RECEIVED = "received"


_STATES = {
    OperationKind.SEND_ACTIVATION: (_MessageState.MADE, _MessageState.SENT),
    OperationKind.SEND_GRADIENT: (_MessageState.MADE, _MessageState.SENT),
    OperationKind.RECV_ACTIVATION: (_MessageState.SENT, _MessageState.RECEIVED),
    OperationKind.RECV_GRADIENT: (_MessageState.SENT, _MessageState.RECEIVED),
}
"""The state of a message before an operation, and after it."""


class _Event(NamedTuple):
    """A message in a state: made, sent or received."""

    state: _MessageState
    message: Message

    def __str__(self) -> str:
        return str(self.message)


def check_blocking(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless sends and receives match one to one and all ranks end even if receives block.

    Here a rank continues after a receive only once the message of that stage, content and micro-batch has arrived
    (messages may overtake each other), it computes only from what it received or made itself, and sends only what it
    made.  Sends do not wait.  ``dependencies.py`` explains why this then holds for all speeds.
    """
    orders = [schedule.get_stage_schedule(rank) for rank in range(schedule.num_stages)]
    _check_matched(schedule, orders)

    def place_of(rank: int, action: int) -> str:
        return f"rank {rank}, operation {action} ({orders[rank][action]})"

    in_order_of_need(orders, _rules(schedule), place_of)


def _check_matched(schedule: Schedule, orders: Orders) -> None:
    """Check that each rank computes its order, and sends and receives what that requires, with the right peers."""
    for rank, order in enumerate(orders):
        expected = tuple(with_messages(schedule.compute_order(rank), schedule.layout))
        if order != expected:
            _check_same_operations(schedule, rank, order, expected)


def _check_same_operations(
    schedule: Schedule, rank: int, order: Sequence[PipelineOp], expected: Sequence[PipelineOp]
) -> None:
    wanted, seen = set(expected), set[PipelineOp]()
    for action, operation in enumerate(order):
        fault = None
        if operation in seen:
            fault = "is there twice"
        elif operation not in wanted:
            fault = "has no counterpart: nothing that is computed needs it"
        if fault:
            place = f"rank {rank}, operation {action} ({_described(operation)})"
            raise InvalidSchedule(f"{schedule.name}: {place} {fault}", rank=rank, operation=operation)
        seen.add(operation)
    for operation in expected:
        if operation not in seen:
            raise InvalidSchedule(
                f"{schedule.row_of(rank)}: missing operation: {_described(operation)} is never done",
                rank=rank,
                operation=operation,
            )


def _described(operation: PipelineOp) -> str:
    if operation.kind.is_compute:
        return str(operation)
    return f"{operation} {'to' if operation.kind.is_send else 'from'} rank {operation.peer}"


def _rules(schedule: Schedule) -> DependencyRules[_Event]:
    layout = schedule.layout
    last = layout.num_virtual_stages - 1

    def needs(operation: PipelineOp) -> tuple[_Event, ...]:
        if operation.kind in _STATES:
            before, _ = _STATES[operation.kind]
            return (_Event(before, operation.message),)
        rank = layout.ranks[operation.stage]
        return tuple(
            [
                _Event(_MessageState.MADE if layout.ranks[message.stage] == rank else _MessageState.RECEIVED, message)
                for message in needs_of(operation, last)
            ]
        )

    def makes(operation: PipelineOp) -> _Event | None:
        if operation.kind in _STATES:
            _, after = _STATES[operation.kind]
            return _Event(after, operation.message)
        made = operation.made
        return None if made is None else _Event(_MessageState.MADE, made)

    return DependencyRules(needs=needs, makes=makes)
