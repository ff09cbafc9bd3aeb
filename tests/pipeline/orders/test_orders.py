"""The orders themselves: against independent implementations, and by their properties for all sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.pipeline import OperationKind, PipelineSchedule, simulate
from tests.pipeline.schedules import Golden, built_in_schedules, cells_of, goldens
from tests.soak import chosen

F, B, I, W = (  # noqa: E741
    OperationKind.FORWARD,
    OperationKind.BACKWARD,
    OperationKind.BACKWARD_INPUT,
    OperationKind.BACKWARD_WEIGHT,
)


@pytest.mark.parametrize("golden", goldens(), ids=str)
def test_orders_equal_those_of_independent_implementations(golden: Golden) -> None:
    assert cells_of(golden.ours()) == [list(order) for order in golden.order]


@pytest.mark.parametrize("golden", [one for one in goldens() if one.title == "LoopedBFS"], ids=str)
def test_sequential_with_chunks_goes_breadth_first(golden: Golden) -> None:
    ours = PipelineSchedule(
        num_stages=golden.num_stages,
        num_microbatches=golden.num_microbatches,
        schedule_type=Type.SEQUENTIAL,
        num_model_chunks=golden.num_model_chunks,
    )
    assert cells_of(ours) == [list(order) for order in golden.order]


def test_the_table_has_every_type_that_others_have() -> None:
    assert {golden.schedule_type for golden in goldens()} == {
        None,
        Type.GPIPE,
        Type.ONE_FORWARD_ONE_BACKWARD,
        Type.INTERLEAVED_ONE_F1B,
        Type.ZERO_BUBBLE,
        Type.ZBV,
        Type.DUALPIPE_V,
    }


def cells(schedule_type: Type, rank: int, *, stages: int = 2, micro_batches: int = 3, chunks: int = 1) -> str:
    schedule = PipelineSchedule(
        num_stages=stages, num_microbatches=micro_batches, schedule_type=schedule_type, num_model_chunks=chunks
    )
    return " ".join(map(str, schedule.compute_order(rank)))


def test_sequential_does_backwards_in_reverse() -> None:
    assert cells(Type.SEQUENTIAL, 1) == "1F0 1F1 1F2 1B2 1B1 1B0"


def test_gpipe_does_backwards_first_in_first_out() -> None:
    assert cells(Type.GPIPE, 1) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_gpipe_with_chunks_goes_chunk_by_chunk() -> None:
    assert cells(Type.GPIPE, 0, micro_batches=2, chunks=2) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


def test_round_robin_does_one_micro_batch_at_a_time() -> None:
    assert cells(Type.ROUND_ROBIN, 0) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert cells(Type.ROUND_ROBIN, 1, micro_batches=2, chunks=2) == "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.ONE_FORWARD_ONE_BACKWARD]))
def test_interleaved_with_one_chunk_is_one_f1b(one_f1b: PipelineSchedule) -> None:
    interleaved = PipelineSchedule(
        num_stages=one_f1b.num_stages,
        num_microbatches=one_f1b.num_microbatches,
        schedule_type=Type.INTERLEAVED_ONE_F1B,
    )
    assert cells_of(interleaved) == cells_of(one_f1b)
    assert interleaved.digest() == one_f1b.digest()


@settings(max_examples=chosen(40, soak=100), deadline=None)
@given(built_in_schedules())
def test_every_stage_passes_every_micro_batch_forward_and_backward_once(schedule: PipelineSchedule) -> None:
    done = Counter(
        (operation.stage, operation.micro_batch, operation.kind)
        for rank in range(schedule.num_stages)
        for operation in schedule.compute_order(rank)
    )
    assert set(done.values()) == {1}
    for stage in range(schedule.num_virtual_stages):
        for micro_batch in range(schedule.num_microbatches):
            kinds = {kind for one, number, kind in done if (one, number) == (stage, micro_batch)}
            assert kinds in ({F, B}, {F, I, W})


@settings(max_examples=chosen(40, soak=100), deadline=None)
@given(built_in_schedules())
def test_all_types_of_all_sizes_can_be_run(schedule: PipelineSchedule) -> None:
    simulation = simulate(schedule)
    assert simulation.ideal == 3 * schedule.num_microbatches * schedule.num_model_chunks


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.ONE_FORWARD_ONE_BACKWARD]))
def test_one_f1b_keeps_no_more_than_ranks_that_are_left(schedule: PipelineSchedule) -> None:
    p, m = schedule.num_stages, schedule.num_microbatches
    assert simulate(schedule).peak_in_flight == tuple(min(p - rank, m) for rank in range(p))


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.SEQUENTIAL, Type.GPIPE]))
def test_schedules_of_two_phases_keep_everything(schedule: PipelineSchedule) -> None:
    kept = schedule.num_microbatches * schedule.num_model_chunks
    assert simulate(schedule).peak_in_flight == (kept,) * schedule.num_stages


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.ROUND_ROBIN]))
def test_round_robin_keeps_one_micro_batch_and_idles_all_but_one_rank(schedule: PipelineSchedule) -> None:
    simulation = simulate(schedule)
    assert simulation.peak_in_flight == (schedule.num_model_chunks,) * schedule.num_stages
    assert simulation.bubble_fraction == pytest.approx((schedule.num_stages - 1) / schedule.num_stages)


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.INTERLEAVED_ONE_F1B, Type.ZERO_BUBBLE], least_micro_batches=6))
def test_the_bubble_is_the_least_also_where_micro_batches_are_no_multiple_of_ranks(schedule: PipelineSchedule) -> None:
    simulation = simulate(schedule)
    per_rank = 1 if schedule.schedule_type is Type.ZERO_BUBBLE else 3
    assert simulation.makespan - simulation.ideal == per_rank * (schedule.num_stages - 1)


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.ZBV, Type.DUALPIPE_V], least_micro_batches=12))
def test_v_shaped_schedules_lose_one_step_per_rank_and_keep_equally_much(schedule: PipelineSchedule) -> None:
    simulation = simulate(schedule)
    p = schedule.num_stages
    assert simulation.makespan - simulation.ideal == p - 1
    assert simulation.peak_in_flight == (2 * p + (schedule.schedule_type is Type.DUALPIPE_V),) * p


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules(types=[Type.ZERO_BUBBLE]), st.integers(1, 4))
def test_zero_bubble_keeps_no_more_than_one_group_of_micro_batches_per_chunk(
    schedule: PipelineSchedule, groups: int
) -> None:
    whole = replace(schedule, num_microbatches=groups * schedule.num_stages)
    assert max(simulate(whole).peak_in_flight) <= schedule.num_stages * schedule.num_model_chunks
