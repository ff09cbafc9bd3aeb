"""Sends and receives: matched, and without deadlock even where receives block."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.pipeline import InvalidSchedule, Message, PipelineOp, PipelineSchedule, check_blocking
from tests.pipeline.schedules import built_in_schedules, changed, reordered
from tests.soak import chosen

MANY = settings(max_examples=chosen(20, soak=40), deadline=None)
PAIR = PipelineSchedule(num_stages=2, num_microbatches=2, schedule_type=Type.ONE_FORWARD_ONE_BACKWARD)


@MANY
@given(built_in_schedules(), st.randoms(use_true_random=False))
def test_ranks_of_any_speed_end_although_receives_block(schedule: PipelineSchedule, random: Random) -> None:
    check_blocking(schedule)
    assert run_at_random(schedule, random) == []


def run_at_random(schedule: PipelineSchedule, random: Random) -> list[PipelineOp]:
    """Let one rank after the other, in random order, do its next operation; return what nobody could do."""
    rest = [list(schedule.get_stage_schedule(rank)) for rank in range(schedule.num_stages)]
    under_way = set[Message]()

    def can_go_on(rank: int) -> bool:
        order = rest[rank]
        return bool(order) and (not order[0].kind.is_receive or order[0].message in under_way)

    while able := [rank for rank in range(schedule.num_stages) if can_go_on(rank)]:
        now = rest[random.choice(able)].pop(0)
        if now.kind.is_send:
            under_way.add(now.message)
        elif now.kind.is_receive:
            under_way.remove(now.message)
    return [operation for order in rest for operation in order]


def drawn_message(data: st.DataObject, schedule: PipelineSchedule) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    order = schedule.get_stage_schedule(rank)
    return rank, data.draw(st.sampled_from([at for at, one in enumerate(order) if one.peer is not None]))


@MANY
@given(built_in_schedules(least_ranks=2), st.data())
def test_a_send_or_receive_that_is_missing_is_named(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank, at = drawn_message(data, schedule)
    order = list(schedule.get_stage_schedule(rank))
    missing = order.pop(at)
    with pytest.raises(InvalidSchedule, match=f"rank {rank}: missing operation: {missing} (to|from) rank") as caught:
        check_blocking(changed(schedule, rank, order))
    assert (caught.value.rank, caught.value.operation) == (rank, missing)


@MANY
@given(built_in_schedules(least_ranks=2), st.data())
def test_a_send_or_receive_that_is_there_twice_is_named(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank, at = drawn_message(data, schedule)
    order = list(schedule.get_stage_schedule(rank))
    with pytest.raises(InvalidSchedule, match=rf"rank {rank}, operation {len(order)} \({order[at]} .* is there twice"):
        check_blocking(changed(schedule, rank, [*order, order[at]]))


@MANY
@given(built_in_schedules(least_ranks=2), st.data())
def test_a_message_with_the_wrong_peer_is_named(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank, at = drawn_message(data, schedule)
    order = list(schedule.get_stage_schedule(rank))
    order[at] = replace(order[at], peer=schedule.num_stages)
    with pytest.raises(InvalidSchedule, match=rf"operation {at} \({order[at]} .* has no counterpart"):
        check_blocking(changed(schedule, rank, order))


@MANY
@given(built_in_schedules(least_ranks=2), st.data())
def test_a_send_before_what_it_sends_was_computed_is_refused(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    order = list(schedule.get_stage_schedule(rank))
    at = data.draw(st.sampled_from([at for at, one in enumerate(order) if one.kind.is_send]))
    order[at - 1], order[at] = order[at], order[at - 1]
    with pytest.raises(InvalidSchedule, match=rf"operation {at - 1} .* waits for rank {rank}, operation {at} "):
        check_blocking(changed(schedule, rank, order))


@MANY
@given(built_in_schedules(least_ranks=2), st.data())
def test_a_receive_behind_what_needs_it_is_refused(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    order = list(schedule.get_stage_schedule(rank))
    at = data.draw(st.sampled_from([at for at, one in enumerate(order) if one.kind.is_receive]))
    order[at + 1], order[at] = order[at], order[at + 1]
    with pytest.raises(InvalidSchedule, match=rf"operation {at} .* waits for rank {rank}, operation {at + 1} "):
        check_blocking(changed(schedule, rank, order))


def test_receives_that_block_too_early_are_a_deadlock_that_is_named() -> None:
    order = list(PAIR.get_stage_schedule(0))
    gradient = next(one for one in order if one.kind.is_receive)
    order.remove(gradient)
    with pytest.raises(InvalidSchedule) as caught:
        check_blocking(changed(PAIR, 0, [gradient, *order]))
    assert str(caught.value) == (
        "deadlock: rank 0, operation 0 (0RG0) waits for rank 1, operation 3 (1SG0); "
        "rank 1, operation 0 (1RA0) waits for rank 0, operation 2 (0SA0)"
    )


def test_a_computation_that_is_missing_beside_its_messages_is_named() -> None:
    order = [one for one in PAIR.get_stage_schedule(1) if str(one) != "1B1"]
    with pytest.raises(InvalidSchedule, match="rank 1: missing operation: 1B1 is never done"):
        check_blocking(changed(PAIR, 1, order))


def test_a_receive_of_what_nobody_sends_is_named() -> None:
    order = [one for one in PAIR.compute_order(1) if str(one) != "1B1"]
    with pytest.raises(InvalidSchedule) as caught:
        check_blocking(reordered(PAIR, 1, order))
    assert str(caught.value) == (
        "rank 0, operation 6 (0RG1) waits for the gradient of stage 1 for micro-batch 1, which nobody gives"
    )
