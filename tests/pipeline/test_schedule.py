from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.errors import UsageError
from asyncpar.pipeline import CustomSchedule, PipelineSchedule, StageLayout
from tests.pipeline.schedules import built_in_schedules, cells_of


def schedule(schedule_type: Type, **changes: Any) -> PipelineSchedule:
    return PipelineSchedule(**{"num_stages": 4, "num_microbatches": 8, "schedule_type": schedule_type, **changes})


@pytest.mark.parametrize("schedule_type", [Type.ZBV, Type.DUALPIPE_V])
@pytest.mark.parametrize("chunks", [1, 2])
def test_v_shaped_schedules_hold_a_stage_on_the_way_down_and_one_on_the_way_up(
    schedule_type: Type, chunks: int
) -> None:
    ours = schedule(schedule_type, num_model_chunks=chunks)
    assert ours.num_model_chunks == 2
    assert [ours.virtual_stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert (ours.rank_of(6), ours.chunk_of(6), ours.chunk_of(1)) == (1, 1, 0)


def test_looped_schedules_hold_every_pth_stage() -> None:
    ours = schedule(Type.INTERLEAVED_ONE_F1B, num_model_chunks=3)
    assert ours.num_virtual_stages == 12
    assert ours.virtual_stages_of(1) == (1, 5, 9)
    assert (ours.rank_of(9), ours.chunk_of(9)) == (1, 2)


@pytest.mark.parametrize("name", ["num_stages", "num_microbatches", "num_model_chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_sizes_that_are_no_whole_number_from_1_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{name}: expected a whole number from 1, got {value!r}"):
        schedule(Type.GPIPE, **{name: value})


def test_more_chunks_than_a_v_has_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(UsageError, match=r"num_model_chunks: expected 2 with zbv, got 3; interleaved_one_f1b"):
        schedule(Type.ZBV, num_model_chunks=3)


def test_chunks_in_one_f1b_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(UsageError, match=r"num_model_chunks: .* got 2; interleaved_one_f1b"):
        schedule(Type.ONE_FORWARD_ONE_BACKWARD, num_model_chunks=2)


def test_a_type_may_be_given_by_name() -> None:
    named = PipelineSchedule(num_stages=4, num_microbatches=8, schedule_type="zbv")  # type: ignore[arg-type]
    assert named == schedule(Type.ZBV)


def test_an_unknown_type_is_refused_with_all_there_are() -> None:
    with pytest.raises(UsageError, match=r"schedule_type: expected one of sequential, .*dualpipe_v, got 'zigzag'"):
        PipelineSchedule(num_stages=4, num_microbatches=8, schedule_type="zigzag")  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, 4, 1.0, True])
def test_a_stage_out_of_range_is_refused(index: Any) -> None:
    ours = schedule(Type.GPIPE)
    for name, method in {
        "stage": ours.get_stage_schedule,
        "rank": ours.compute_order,
        "virtual": ours.rank_of,
    }.items():
        with pytest.raises(UsageError, match=rf"{name}: expected 0\.\.3, got {index!r}"):
            method(index)
    with pytest.raises(UsageError, match="virtual: expected"):
        ours.chunk_of(index)
    with pytest.raises(UsageError, match="rank: expected"):
        ours.virtual_stages_of(index)


@settings(max_examples=40, deadline=None)
@given(built_in_schedules())
def test_equal_orders_have_equal_digests_however_they_were_made(ours: PipelineSchedule) -> None:
    assert CustomSchedule(cells_of(ours)).digest() == ours.digest()


def test_digests_differ_between_types_sizes_and_layouts() -> None:
    one = [schedule(schedule_type) for schedule_type in Type if schedule_type is not Type.INTERLEAVED_ONE_F1B]
    one += [schedule(Type.GPIPE, num_microbatches=9), schedule(Type.GPIPE, num_stages=5)]
    one += [schedule(Type.GPIPE, num_model_chunks=2)]
    assert len({ours.digest() for ours in one}) == len(one)


def test_a_layout_in_which_ranks_hold_unequally_many_stages_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ranks: expected each rank from 0 to 1 .* got \{0: 2, 1: 1\}"):
        StageLayout(ranks=(0, 1, 0), num_stages=2)
    with pytest.raises(UsageError, match="ranks: expected each rank"):
        StageLayout(ranks=(0, 2), num_stages=2)
    with pytest.raises(UsageError, match="ranks: expected each rank"):
        StageLayout(ranks=(), num_stages=0)
