"""Whether sends and receives belong together, and whether ranks end even if receives block.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from asyncpar.pipeline.communication import with_messages
from asyncpar.pipeline.dependencies import Orders, Rules, in_order_of_need, needs_of
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.operation import Message, OperationKind, PipelineOp
from asyncpar.pipeline.schedule import Schedule


class _State(StrEnum):
    MADE = "made"
    SENT = "sent"
    RECEIVED = "received"


_STATES = {
    OperationKind.SEND_ACTIVATION: (_State.MADE, _State.SENT),
    OperationKind.SEND_GRADIENT: (_State.MADE, _State.SENT),
    OperationKind.RECV_ACTIVATION: (_State.SENT, _State.RECEIVED),
    OperationKind.RECV_GRADIENT: (_State.SENT, _State.RECEIVED),
}
"""How far a message has to be before an operation, and how far it is behind it."""


class _Event(NamedTuple):
    """How far a message has come."""

    state: _State
    message: Message

    def __str__(self) -> str:
        return str(self.message)


def check_blocking(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless sends and receives match one to one and all ranks end although receives block.

    Here a rank goes on behind a receive only once the message of that stage, content and micro-batch is there (messages
    may overtake each other), it computes only from what it received or made itself, and sends only what it made.
    Sends do not wait.  ``dependencies.py`` says why this holds for all speeds then.
    """
    orders = [schedule.get_stage_schedule(rank) for rank in range(schedule.num_stages)]
    _check_matched(schedule, orders)

    def place_of(rank: int, action: int) -> str:
        return f"rank {rank}, operation {action} ({orders[rank][action]})"

    in_order_of_need(orders, _rules(schedule), place_of)


def _check_matched(schedule: Schedule, orders: Orders) -> None:
    """Each rank must compute its order, and send and receive exactly what that needs, with the right peers."""
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


def _rules(schedule: Schedule) -> Rules[_Event]:
    layout = schedule.layout
    last = layout.num_virtual_stages - 1

    def needs(operation: PipelineOp) -> tuple[_Event, ...]:
        if operation.kind in _STATES:
            before, _ = _STATES[operation.kind]
            return (_Event(before, operation.message),)
        rank = layout.ranks[operation.stage]
        return tuple(
            [
                _Event(_State.MADE if layout.ranks[message.stage] == rank else _State.RECEIVED, message)
                for message in needs_of(operation, last)
            ]
        )

    def makes(operation: PipelineOp) -> _Event | None:
        if operation.kind in _STATES:
            _, after = _STATES[operation.kind]
            return _Event(after, operation.message)
        made = operation.made
        return None if made is None else _Event(_State.MADE, made)

    return Rules(needs=needs, makes=makes)
