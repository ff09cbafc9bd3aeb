"""Good schedules, spoilt in one place: the fault is named, with its rank and its action."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.errors import UsageError
from asyncpar.pipeline import (
    InvalidSchedule,
    OperationKind,
    PipelineOp,
    PipelineSchedule,
    StageLayout,
    check_schedule,
    simulate,
)
from tests.pipeline.schedules import HandMade, backward, built_in_schedules, forward, reordered
from tests.soak import chosen

MANY = settings(max_examples=chosen(20, soak=40), deadline=None)


def refused(schedule: HandMade) -> InvalidSchedule:
    with pytest.raises(InvalidSchedule) as caught:
        simulate(schedule)
    assert isinstance(caught.value, UsageError)
    return caught.value


def drawn_action(data: st.DataObject, schedule: PipelineSchedule) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    return rank, data.draw(st.integers(0, len(schedule.compute_order(rank)) - 1))


@MANY
@given(built_in_schedules(), st.data())
def test_a_missing_action_is_named(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank, action = drawn_action(data, schedule)
    order = list(schedule.compute_order(rank))
    missing = order.pop(action)
    fault = refused(reordered(schedule, rank, order))
    assert (fault.rank, fault.operation) == (rank, missing)
    assert f"rank {rank}: missing action: {missing} is never done" in str(fault)


@MANY
@given(built_in_schedules(), st.data())
def test_an_action_that_is_there_twice_is_named_with_both_places(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    rank, action = drawn_action(data, schedule)
    order = list(schedule.compute_order(rank))
    again = data.draw(st.integers(action + 1, len(order)))
    order.insert(again, order[action])
    fault = refused(reordered(schedule, rank, order))
    assert (fault.rank, fault.operation) == (rank, order[action])
    assert str(fault) == (
        f"rank {rank}, action {again} ({order[action]}): "
        f"the same action is there before: rank {rank}, action {action} ({order[action]})"
    )


@MANY
@given(built_in_schedules(least_ranks=2), st.data())
def test_an_action_on_the_wrong_rank_is_named_with_the_right_one(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    rank, action = drawn_action(data, schedule)
    other = data.draw(st.integers(0, schedule.num_stages - 1).filter(lambda one: one != rank))
    moved = schedule.compute_order(rank)[action]
    fault = refused(reordered(schedule, other, [*schedule.compute_order(other), moved]))
    assert (fault.rank, fault.operation) == (other, moved)
    assert f"wrong rank: stage {moved.stage} belongs to rank {rank}, not to rank {other}" in str(fault)


@MANY
@given(built_in_schedules(), st.data())
def test_a_backward_before_its_forward_is_a_deadlock_of_the_rank_with_itself(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    order = list(schedule.compute_order(rank))
    first = data.draw(st.sampled_from([at for at, one in enumerate(order) if one.kind is OperationKind.FORWARD]))
    later = next(at for at, one in enumerate(order) if depends(one, order[first]))
    order[first], order[later] = order[later], order[first]
    assert "deadlock: " in str(refused(reordered(schedule, rank, order)))


def depends(operation: PipelineOp, forward_pass: PipelineOp) -> bool:
    same = (operation.stage, operation.micro_batch) == (forward_pass.stage, forward_pass.micro_batch)
    return same and operation.kind.makes_gradient


@MANY
@given(built_in_schedules(), st.data())
def test_any_two_actions_may_change_places_if_and_only_if_the_result_still_ends(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    rank, one = drawn_action(data, schedule)
    order = list(schedule.compute_order(rank))
    other = data.draw(st.integers(0, len(order) - 1))
    order[one], order[other] = order[other], order[one]
    swapped = reordered(schedule, rank, order)
    if ends(swapped):
        simulate(swapped)
    else:
        assert str(refused(swapped)).startswith("deadlock: ")


def ends(schedule: HandMade) -> bool:
    """Try all ranks over and over until nothing moves: slow, but obvious."""
    orders = [list(schedule.compute_order(rank)) for rank in range(schedule.num_stages)]
    last, done = schedule.num_virtual_stages - 1, set[tuple[str, int, int]]()
    moved = True
    while moved:
        moved = False
        for order in orders:
            while order and can_run(order[0], last, done):
                now = order.pop(0)
                done.add((now.kind.symbol.replace("I", "B"), now.stage, now.micro_batch))
                moved = True
    return not any(orders)


def can_run(operation: PipelineOp, last: int, done: set[tuple[str, int, int]]) -> bool:
    stage, micro_batch = operation.stage, operation.micro_batch
    if operation.kind is OperationKind.FORWARD:
        return stage == 0 or ("F", stage - 1, micro_batch) in done
    if operation.kind is OperationKind.BACKWARD_WEIGHT:
        return ("B", stage, micro_batch) in done
    return ("F", stage, micro_batch) in done and (stage == last or ("B", stage + 1, micro_batch) in done)


def hand_made(*rows: list[PipelineOp]) -> HandMade:
    return HandMade(rows, StageLayout.looped(len(rows)), num_microbatches=2)


def test_ranks_that_wait_for_each_other_are_named_with_what_each_waits_for() -> None:
    fault = refused(
        hand_made(
            [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)],
            [forward(1, 0), forward(1, 1), backward(1, 0), backward(1, 1)],
        )
    )
    assert str(fault) == (
        "deadlock: rank 0, action 1 (0B0) waits for rank 1, action 2 (1B0); "
        "rank 1, action 1 (1F1) waits for rank 0, action 2 (0F1)"
    )
    assert (fault.rank, fault.operation) == (0, backward(0, 0))


def test_only_the_ranks_of_the_circle_are_named_and_not_those_that_wait_for_them() -> None:
    fault = refused(
        hand_made(
            [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)],
            [forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1)],
            [forward(2, 0), backward(2, 0), backward(2, 1), forward(2, 1)],
        )
    )
    assert str(fault) == ("deadlock: rank 2, action 2 (2B1) waits for rank 2, action 3 (2F1), which stands behind it")


def test_a_whole_and_a_half_backward_of_the_same_micro_batch_are_refused() -> None:
    half = PipelineOp(kind=OperationKind.BACKWARD_INPUT, stage=0, micro_batch=0)
    row = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1), half]
    assert "action 4 (0I0): the whole backward pass is there as well: rank 0, action 1" in str(refused(hand_made(row)))


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        (forward(1, 0), "stage: expected 0..0, got 1"),
        (forward(-1, 0), "stage: expected 0..0, got -1"),
        (forward(0, 2), "micro_batch: expected 0..1, got 2"),
        (PipelineOp(kind=OperationKind.FORWARD, stage=0, micro_batch=0, chunk=1), "chunk: expected 0, got 1"),
        (PipelineOp(kind=OperationKind.SEND_ACTIVATION, stage=0, micro_batch=0), "kind: expected what is computed"),
    ],
)
def test_what_is_out_of_range_is_named(operation: PipelineOp, fault: str) -> None:
    row = [operation, forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    with pytest.raises(InvalidSchedule, match=rf"rank 0, action 0 .*: {re.escape(fault)}"):
        check_schedule(hand_made(row))


def test_a_schedule_that_contradicts_its_layout_is_refused() -> None:
    schedule = hand_made([forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)])
    schedule.num_stages = 2
    with pytest.raises(UsageError, match="hand-made: num_stages: expected 1 as in the layout, got 2"):
        check_schedule(schedule)
