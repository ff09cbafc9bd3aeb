"""Layers in virtual stages: several per rank, in a loop or in a V."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.core.config.schedule_type import parse_schedule_name, schedule_record
from asyncpar.core.config.slicing import spread_layers
from asyncpar.errors import UsageError

INTERLEAVED, ZBV = PipelineScheduleType.INTERLEAVED_ONE_F1B, PipelineScheduleType.ZBV


def config(**settings: Any) -> ThreeDParallelismConfig:
    return ThreeDParallelismConfig(**{"pp_size": 2, "num_layers": 8, **settings})


def test_chunks_share_the_layers_of_their_stage() -> None:
    interleaved = config(num_model_chunks=2, pipeline_schedule=INTERLEAVED)
    assert interleaved.virtual_stage_layers() == (2, 2, 2, 2)
    assert interleaved.stage_layers() == (4, 4)


def test_a_v_shaped_schedule_has_two_chunks_without_asking() -> None:
    assert config(pipeline_schedule=ZBV).chunks_per_stage == 2
    assert config(pipeline_schedule=ZBV).virtual_stage_layers() == (2, 2, 2, 2)


def test_a_split_by_rank_goes_round_in_a_loop_and_back_in_a_v() -> None:
    split = {"num_layers": 8, "layers_per_stage": (6, 2)}
    assert config(pipeline_schedule=INTERLEAVED, num_model_chunks=2, **split).virtual_stage_layers() == (3, 1, 3, 1)
    assert config(pipeline_schedule=ZBV, **split).virtual_stage_layers() == (3, 1, 1, 3)


def test_what_a_rank_has_is_shared_by_its_pieces_with_the_larger_part_first() -> None:
    split = {"num_layers": 8, "layers_per_stage": (5, 3)}
    assert config(pipeline_schedule=INTERLEAVED, num_model_chunks=2, **split).virtual_stage_layers() == (3, 2, 2, 1)
    assert config(pipeline_schedule=ZBV, **split).virtual_stage_layers() == (3, 2, 1, 2)


def test_a_split_by_virtual_stage_is_taken_as_it_is() -> None:
    split = {"num_layers": 7, "layers_per_stage": (3, 1, 1, 2)}
    looped, v_shaped = config(num_model_chunks=2, **split), config(pipeline_schedule=ZBV, **split)
    assert looped.virtual_stage_layers() == v_shaped.virtual_stage_layers() == (3, 1, 1, 2)
    assert (looped.stage_layers(), v_shaped.stage_layers()) == ((4, 3), (5, 2))


def test_the_ends_of_the_model_are_on_two_stages_of_a_loop_and_on_one_of_a_v() -> None:
    assert config().end_stages == (0, 1)
    assert config(pp_size=4).end_stages == (0, 3)
    assert config(pipeline_schedule=ZBV).end_stages == (0,)
    assert config(pp_size=1).end_stages == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_model_chunks": 3}, r"num_layers: expected a multiple of pp_size \* num_model_chunks = 2 \* 3, got 8"),
        ({"num_model_chunks": 5}, r"num_layers: expected at least pp_size \* num_model_chunks = 2 \* 5, got 8"),
        ({"num_model_chunks": 2, "layers_per_stage": (7, 1)}, "layers_per_stage: expected at least 2 for each rank"),
        ({"num_model_chunks": 2, "layers_per_stage": (8,)}, "layers_per_stage: expected 2 or 4 positive numbers"),
        ({"num_model_chunks": 3, "pipeline_schedule": "zbv"}, "num_model_chunks: expected 2 with zbv, got 3"),
        (
            {"num_model_chunks": 2, "pipeline_schedule": "one_forward_one_backward"},
            "num_model_chunks: expected 1 with one_forward_one_backward, got 2; interleaved_one_f1b takes more",
        ),
    ],
)
def test_chunks_that_do_not_come_out_are_refused_before_training(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**settings).validate(2)


def test_layers_are_spread_with_the_larger_numbers_first() -> None:
    assert spread_layers(7, 3) == (3, 2, 2)
    with pytest.raises(UsageError, match="num_layers: expected at least 4, one for each stage, got 3"):
        spread_layers(3, 4)


@pytest.mark.parametrize("member", PipelineScheduleType)
def test_every_schedule_is_found_by_its_value_and_by_its_short_name(member: PipelineScheduleType) -> None:
    spellings = (
        member.value,
        schedule_record(member).short,
        member.value.replace("_", "-"),
        schedule_record(member).short.upper(),
    )
    assert {parse_schedule_name(spelling) for spelling in spellings} == {member}


def test_an_unknown_schedule_is_refused_with_the_short_names() -> None:
    with pytest.raises(UsageError, match=r"schedule: expected one of sequential, .*, 1f1b, .*, got '2f2b'"):
        parse_schedule_name("2f2b")
