"""The values of 3D-parallel configuration and of who is who in it."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from asyncpar.core.config.checks import is_default
from asyncpar.core.config.parallel import (
    CommunicationStrategy,
    MemoryOptimizationStrategy,
    PipelineScheduleType,
    ProcessGroupIds,
    RankMapping,
    ThreeDParallelismConfig,
)
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.errors import UsageError

CUBE = ThreeDParallelismConfig(dp_size=2, tp_size=2, pp_size=2)
GOLDENS = Path(__file__).parents[2] / "goldens"


def test_defaults_describe_one_rank() -> None:
    config = ThreeDParallelismConfig()
    assert (config.dp_size, config.tp_size, config.pp_size, config.num_layers) == (1, 1, 1, 24)
    assert config.memory_strategy is MemoryOptimizationStrategy.STANDARD
    assert config.comm_strategy is CommunicationStrategy.ALL_REDUCE
    assert config.pipeline_schedule is PipelineScheduleType.INTERLEAVED_ONE_F1B
    assert (config.micro_batch_size, config.max_memory_per_device, config.communication_timeout_ms) == (1, 8.0, 30_000)
    assert not config.enable_gradient_checkpointing
    assert not config.enable_mixed_precision
    config.validate(1)


def test_a_world_of_the_wrong_size_is_refused_with_the_product() -> None:
    with pytest.raises(UsageError, match=r"configuration mismatch: expected 8 devices \(2\*2\*2\), got 4"):
        CUBE.validate(4)


@pytest.mark.parametrize(
    "field", ["dp_size", "tp_size", "pp_size", "num_layers", "micro_batch_size", "num_model_chunks"]
)
def test_sizes_of_zero_are_refused_by_name(field: str) -> None:
    settings: dict[str, Any] = {field: 0}
    with pytest.raises(UsageError, match=f"{field}: expected a positive number, got 0"):
        ThreeDParallelismConfig(**settings)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="pp_size: expected at most num_layers = 2, got 4"):
        ThreeDParallelismConfig(pp_size=4, num_layers=2)


def test_layers_are_split_evenly_over_stages() -> None:
    assert ThreeDParallelismConfig(pp_size=4, num_layers=24).stage_layers() == (6, 6, 6, 6)


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="num_layers: expected a multiple of pp_size = 3, got 25"):
        ThreeDParallelismConfig(pp_size=3, num_layers=25).validate(3)


def test_an_explicit_uneven_split_is_accepted() -> None:
    config = ThreeDParallelismConfig(pp_size=3, num_layers=25, layers_per_stage=(9, 8, 8))
    config.validate(3)
    assert config.stage_layers() == (9, 8, 8)


@pytest.mark.parametrize("split", [(9, 8), (9, 8, 9), (25, 0, 0)])
def test_a_wrong_explicit_split_is_refused(split: tuple[int, ...]) -> None:
    config = ThreeDParallelismConfig(pp_size=3, num_layers=25, layers_per_stage=split)
    with pytest.raises(UsageError, match="layers_per_stage: expected 3 positive numbers with sum 25"):
        config.validate(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_size": 2.0}, r"dp_size: expected a whole number, got 2\.0"),
        ({"tp_size": "2"}, "tp_size: expected a whole number, got '2'"),
        ({"pp_size": True}, "pp_size: expected a whole number, got True"),
        ({"communication_timeout_ms": 0}, "communication_timeout_ms: expected a positive number, got 0"),
        ({"max_memory_per_device": 0}, "max_memory_per_device: expected a positive number of GB, got 0"),
        ({"max_memory_per_device": float("nan")}, "max_memory_per_device: expected a positive number of GB, got nan"),
        ({"memory_strategy": "thrifty"}, "memory_strategy: expected one of basic, standard, .*, got 'thrifty'"),
        ({"comm_strategy": None}, "comm_strategy: expected one of all_reduce, .*, got None"),
        ({"pipeline_schedule": "fastest"}, "pipeline_schedule: expected one of sequential, .*, got 'fastest'"),
        ({"layers_per_stage": (8, 8.0, 8)}, r"layers_per_stage: expected a whole number, got 8\.0"),
        ({"order": 3}, "order: expected axis names joined by '-', got 3"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ThreeDParallelismConfig(**settings)


def test_choices_may_be_spelled() -> None:
    settings: dict[str, Any] = {"memory_strategy": "extreme", "comm_strategy": "adaptive", "pipeline_schedule": "zbv"}
    config = ThreeDParallelismConfig(**settings)
    assert config.memory_strategy is MemoryOptimizationStrategy.EXTREME
    assert config.comm_strategy is CommunicationStrategy.ADAPTIVE
    assert config.pipeline_schedule is PipelineScheduleType.ZBV


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(UsageError, match="heads: expected a divisor of hidden = 100, got 3"):
        ThreeDParallelismConfig().validate(1, hidden=100, heads=3)


def test_a_batch_gives_each_replica_its_micro_batches() -> None:
    config = ThreeDParallelismConfig(dp_size=2, micro_batch_size=4)
    assert config.micro_batches(64) == 8
    with pytest.raises(UsageError, match=r"batch: expected a multiple of dp_size \* micro_batch_size = 2 \* 4, got 12"):
        config.validate(2, batch=12)
    with pytest.raises(UsageError, match="batch: expected a positive number, got 0"):
        config.validate(2, batch=0)


@pytest.mark.parametrize("model", [{"hidden": 129}, {"heads": 3}, {"vocabulary": 257}])
def test_a_model_that_tensor_parallelism_does_not_divide_is_refused(model: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"tp_size: expected a divisor of {next(iter(model))}"):
        CUBE.validate(8, **model)


@pytest.mark.parametrize(
    ("strategy", "activation"), [("basic", 2.0), ("standard", 1.5), ("aggressive", 1.2), ("extreme", 1.0)]
)
def test_the_rough_memory_rule_follows_the_strategy(strategy: str, activation: float) -> None:
    config = ThreeDParallelismConfig(
        tp_size=2, pp_size=4, num_layers=24, memory_strategy=MemoryOptimizationStrategy(strategy)
    )
    needed = config.memory_requirements(rough=True)
    assert needed == config.memory_requirements()
    model = 1024.0 * 6 / 2
    assert needed.model_memory_mb == model
    assert needed.activation_memory_mb == pytest.approx(model * activation)
    assert needed.optimizer_memory_mb == 2 * model
    assert needed.total_memory_mb == pytest.approx(model * (3 + activation))


def test_a_configuration_alone_cannot_say_what_is_really_needed() -> None:
    with pytest.raises(UsageError, match=r"rough: expected True, .*asyncpar\.estimate\.memory_requirements"):
        CUBE.memory_requirements(rough=False)


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0, 0)), (3, (0, 1, 1)), (5, (1, 0, 1)), (7, (1, 1, 1))])
def test_ranks_have_the_coordinates_of_the_default_order(rank: int, place: tuple[int, int, int]) -> None:
    mapping = RankMapping(CUBE, rank)
    assert (mapping.dp_rank, mapping.tp_rank, mapping.pp_rank) == place
    assert mapping.from_3d_coords(*place) == rank


def test_the_class_says_ranks_of_a_configuration() -> None:
    assert RankMapping.from_3d_coords(CUBE, 1, 1, 1) == RankMapping.from_3d_coords(1, 1, 1, CUBE) == 7
    assert RankMapping.from_3d_coords(CUBE, dp_rank=1, tp_rank=0, pp_rank=1) == 5
    assert RankMapping.from_3d_coords(config=CUBE, dp_rank=0, tp_rank=1, pp_rank=0) == 2
    with pytest.raises(UsageError, match="config: expected a ThreeDParallelismConfig beside the coordinates, got 1"):
        RankMapping.from_3d_coords(1, 1, 1)


def test_mappings_are_equal_by_value_and_show_their_place() -> None:
    assert RankMapping(CUBE, 5) == RankMapping(CUBE, 5)
    assert hash(RankMapping(CUBE, 5)) == hash(RankMapping(CUBE, 5))
    assert RankMapping(CUBE, 5) != RankMapping(CUBE, 4)
    assert RankMapping(CUBE, 5) != RankMapping(CUBE, 5, local_rank=1)
    assert repr(RankMapping(CUBE, 5)) == (
        "RankMapping(global_rank=5, local_rank=None, world_size=8, dp_rank=1, tp_rank=0, pp_rank=1)"
    )


def test_neighbours_in_the_pipeline_end_at_its_ends() -> None:
    assert (RankMapping(CUBE, 5).prev_pp_rank(), RankMapping(CUBE, 5).next_pp_rank()) == (4, None)
    assert (RankMapping(CUBE, 4).prev_pp_rank(), RankMapping(CUBE, 4).next_pp_rank()) == (None, 5)


def test_heads_and_tails_follow_from_coordinates() -> None:
    mapping = RankMapping(CUBE, 5)
    assert not mapping.is_dp_head()
    assert mapping.is_tp_head()
    assert not mapping.is_pp_head()
    assert mapping.is_pp_tail()


def test_groups_of_a_rank_contain_it_and_follow_the_axis() -> None:
    mapping = RankMapping(CUBE, 5)
    assert mapping.dp_group_ranks() == (1, 5)
    assert mapping.tp_group_ranks() == (5, 7)
    assert mapping.pp_group_ranks() == (4, 5)


def test_the_local_rank_is_the_launchers_and_not_derived() -> None:
    assert RankMapping(CUBE, 5).local_rank is None
    assert RankMapping(CUBE, 5, local_rank=1).local_rank == 1


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_of_the_world_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=rf"rank: expected 0\.\.7, got {rank}"):
        RankMapping(CUBE, rank)


def test_coordinates_outside_of_an_axis_do_not_alias() -> None:
    with pytest.raises(UsageError, match=r"pp: expected a coordinate 0\.\.1, got 2"):
        RankMapping(CUBE, 0).from_3d_coords(0, 0, 2)


def test_a_free_order_makes_other_ranks_adjacent() -> None:
    config = ThreeDParallelismConfig(dp_size=2, tp_size=2, pp_size=2, order="tp-cp-dp-pp")
    assert RankMapping(config, 0).tp_group_ranks() == (0, 1)
    assert RankMapping(config, 0).dp_group_ranks() == (0, 2)
    assert RankMapping(config, 0).pp_group_ranks() == (0, 4)


@pytest.mark.parametrize("order", ["tp-dp", "tp-tp-dp-pp", "", "tp-dp-p9", "tp-pd-dp-pp", "TP-dp-pp-tp"])
def test_a_wrong_order_is_refused(order: str) -> None:
    with pytest.raises(UsageError, match="order: expected"):
        ThreeDParallelismConfig(order=order)


def test_group_names_say_what_their_ranks_share() -> None:
    names = ProcessGroupIds(CUBE)
    assert names.get_dp_group_id(0, 1) == "dp_group_tp0_pp1"
    assert names.get_tp_group_id(1, 0) == "tp_group_dp1_pp0"
    assert names.get_pp_group_id(1, 1) == "pp_group_dp1_tp1"


def test_a_group_that_does_not_exist_has_no_name() -> None:
    with pytest.raises(UsageError, match=r"tp_rank: expected 0\.\.1, got 2"):
        ProcessGroupIds(CUBE).get_dp_group_id(2, 0)


@pytest.mark.parametrize(
    "golden", json.loads((GOLDENS / "rank_groups.json").read_text()), ids=lambda g: str(g["order"])
)
def test_groups_are_those_of_other_frameworks(golden: dict[str, Any]) -> None:
    layout = RankOrder.parse(golden["order"], golden["sizes"])
    for axis, groups in golden["groups"].items():
        assert [list(group) for group in layout.groups(axis)] == groups
        assert [list(layout.group(axis, group[-1])) for group in groups] == groups


def test_an_unknown_axis_has_no_groups() -> None:
    with pytest.raises(UsageError, match="axis: expected one of pp, tp, dp, got 'ep'"):
        CUBE.rank_order().groups("ep")


def test_a_timeout_that_was_given_differs_from_the_default_that_it_equals() -> None:
    left = ThreeDParallelismConfig()
    given = ThreeDParallelismConfig(communication_timeout_ms=30_000)
    assert left == given
    assert repr(left) == repr(given)
    for config, expected in ((left, True), (given, False)):
        for same in (config, replace(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert is_default(same.communication_timeout_ms) is expected
        assert is_default(asdict(config)["communication_timeout_ms"]) is expected
