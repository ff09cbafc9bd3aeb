from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.pipeline import Message, PipelineOp, PipelineSchedule
from tests.pipeline.schedules import built_in_schedules


def line(operations: tuple[PipelineOp, ...]) -> str:
    return " ".join(f"{one}" if one.peer is None else f"{one}@{one.peer}" for one in operations)


def test_a_middle_stage_receives_before_and_sends_behind_each_pass() -> None:
    schedule = PipelineSchedule(num_stages=3, num_microbatches=1, schedule_type=Type.GPIPE)
    assert line(schedule.get_stage_schedule(0)) == "0F0 0SA0@1 0RG0@1 0B0"
    assert line(schedule.get_stage_schedule(1)) == "1RA0@0 1F0 1SA0@2 1RG0@2 1B0 1SG0@0"
    assert line(schedule.get_stage_schedule(2)) == "2RA0@1 2F0 2B0 2SG0@1"


def test_gradients_leave_before_weight_gradients_are_computed() -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=1, schedule_type=Type.ZERO_BUBBLE)
    assert line(schedule.get_stage_schedule(1)) == "1RA0@0 1F0 1I0 1SG0@0 1W0"


def test_the_last_rank_of_a_v_hands_over_to_itself_without_a_message() -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=1, schedule_type=Type.ZBV)
    assert line(schedule.get_stage_schedule(0)) == "0F0 0SA0@1 3RA0@1 3F0 3I0 3SG0@1 3W0 0RG0@1 0I0 0W0"
    assert line(schedule.get_stage_schedule(1)) == "1RA0@0 1F0 2F0 2SA0@0 2RG0@0 2I0 2W0 1I0 1SG0@0 1W0"


def test_one_rank_alone_sends_nothing() -> None:
    for schedule_type in Type:
        schedule = PipelineSchedule(num_stages=1, num_microbatches=3, schedule_type=schedule_type)
        assert schedule.get_stage_schedule(0) == schedule.compute_order(0)


@settings(max_examples=40, deadline=None)
@given(built_in_schedules())
def test_sends_and_receives_match_one_to_one_and_name_each_other(schedule: PipelineSchedule) -> None:
    sent, received = Counter[tuple[Message, int, int | None]](), Counter[tuple[Message, int | None, int]]()
    for rank in range(schedule.num_stages):
        for operation in schedule.get_stage_schedule(rank):
            assert schedule.rank_of(operation.stage) == rank
            assert schedule.chunk_of(operation.stage) == operation.chunk
            if operation.kind.is_send:
                sent[operation.message, rank, operation.peer] += 1
            elif operation.kind.is_receive:
                received[operation.message, operation.peer, rank] += 1
    assert sent == received
    assert set(sent.values()) <= {1}
    crossings = sum(a != b for a, b in zip(schedule.layout.ranks, schedule.layout.ranks[1:], strict=False))
    assert sent.total() == 2 * crossings * schedule.num_microbatches


@settings(max_examples=40, deadline=None)
@given(built_in_schedules())
def test_without_messages_the_schedule_of_a_rank_is_its_compute_order(schedule: PipelineSchedule) -> None:
    for rank in range(schedule.num_stages):
        computed = tuple(one for one in schedule.get_stage_schedule(rank) if one.kind.is_compute)
        assert computed == schedule.compute_order(rank)
