"""Groups of a 3D-parallel world by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType, ProcessGroupIds, RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.errors import UsageError

GOLDENS = json.loads((Path(__file__).parents[2] / "goldens" / "rank_groups.json").read_text())
THREE_AXES = [golden for golden in GOLDENS if golden["sizes"].get("cp", 1) == 1]
CUBE = ThreeDParallelismConfig(dp_size=2, tp_size=2, pp_size=2)


def test_every_group_of_a_cube_is_named_with_its_ranks() -> None:
    assert ProcessGroupIds(CUBE).groups() == {
        "dp_group_tp0_pp0": (0, 4),
        "dp_group_tp0_pp1": (1, 5),
        "dp_group_tp1_pp0": (2, 6),
        "dp_group_tp1_pp1": (3, 7),
        "tp_group_dp0_pp0": (0, 2),
        "tp_group_dp0_pp1": (1, 3),
        "tp_group_dp1_pp0": (4, 6),
        "tp_group_dp1_pp1": (5, 7),
        "pp_group_dp0_tp0": (0, 1),
        "pp_group_dp0_tp1": (2, 3),
        "pp_group_dp1_tp0": (4, 5),
        "pp_group_dp1_tp1": (6, 7),
        "model_group_dp0": (0, 1, 2, 3),
        "model_group_dp1": (4, 5, 6, 7),
        "embedding_group_dp0_tp0": (0, 1),
        "embedding_group_dp0_tp1": (2, 3),
        "embedding_group_dp1_tp0": (4, 5),
        "embedding_group_dp1_tp1": (6, 7),
    }


def test_the_stages_in_between_share_no_embedding() -> None:
    config = ThreeDParallelismConfig(pp_size=4)
    assert ProcessGroupIds(config).groups()["embedding_group_dp0_tp0"] == (0, 3)


def test_a_v_shaped_pipeline_has_both_embeddings_on_its_first_rank() -> None:
    config = ThreeDParallelismConfig(pp_size=4, pipeline_schedule=PipelineScheduleType.DUALPIPE_V)
    assert ProcessGroupIds(config).groups()["embedding_group_dp0_tp0"] == (0,)


@pytest.mark.parametrize("order", ["-".join(axes) for axes in itertools.permutations(("dp", "tp", "cp", "pp"))])
def test_names_belong_to_the_groups_of_each_rank_in_any_order(order: str) -> None:
    config = ThreeDParallelismConfig(dp_size=2, tp_size=3, pp_size=4, order=order)
    names, groups = ProcessGroupIds(config), ProcessGroupIds(config).groups()
    for rank in range(config.world_size):
        mapping = RankMapping(config, rank)
        dp, tp, pp = mapping.dp_rank, mapping.tp_rank, mapping.pp_rank
        assert groups[names.get_dp_group_id(tp, pp)] == mapping.dp_group_ranks()
        assert groups[names.get_tp_group_id(dp, pp)] == mapping.tp_group_ranks()
        assert groups[names.get_pp_group_id(dp, tp)] == mapping.pp_group_ranks()
        assert rank in groups[names.get_model_group_id(dp)]


def test_names_outside_of_the_world_are_refused() -> None:
    with pytest.raises(UsageError, match=r"dp_rank: expected 0\.\.1, got 2"):
        ProcessGroupIds(CUBE).get_model_group_id(2)
    with pytest.raises(UsageError, match=r"tp_rank: expected 0\.\.1, got -1"):
        ProcessGroupIds(CUBE).get_embedding_group_id(0, -1)


@pytest.mark.parametrize("golden", THREE_AXES, ids=lambda golden: str(golden["order"]))
def test_names_lead_to_the_groups_of_other_frameworks(golden: dict[str, Any]) -> None:
    sizes = {axis: golden["sizes"][axis] for axis in ("dp", "tp", "pp")}
    config = ThreeDParallelismConfig(
        dp_size=sizes["dp"], tp_size=sizes["tp"], pp_size=sizes["pp"], order=golden["order"]
    )
    groups = ProcessGroupIds(config).groups()
    for axis in sizes:
        named = {ranks for name, ranks in groups.items() if name.startswith(f"{axis}_group")}
        assert named == set(map(tuple, golden["groups"][axis]))


@pytest.mark.parametrize("order", ["-".join(axes) for axes in itertools.permutations(("dp", "tp", "pp"))])
def test_groups_are_blocks_along_one_axis(order: str) -> None:
    layout = RankOrder.parse(order, {"dp": 2, "tp": 3, "pp": 4})
    for axis in ("dp", "tp", "pp"):
        assert layout.groups(axis) == layout.blocks((axis,))
        assert all(layout.group(axis, rank) == ranks for ranks in layout.groups(axis) for rank in ranks)


def test_blocks_span_several_axes() -> None:
    layout = RankOrder.parse("tp-dp-pp", {"tp": 2, "dp": 2, "pp": 2})
    assert layout.blocks(("tp", "pp")) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.blocks(()) == tuple((rank,) for rank in range(8))
    assert layout.blocks(("pp", "dp", "tp")) == (tuple(range(8)),)
    with pytest.raises(UsageError, match="axis: expected one of tp, dp, pp, got 'cp'"):
        layout.blocks(("tp", "cp"))


def test_names_are_listed_by_kind_in_the_order_of_their_coordinates() -> None:
    ids = ProcessGroupIds(ThreeDParallelismConfig(dp_size=3, tp_size=2))
    assert ids.dp_groups == ("dp_group_tp0_pp0", "dp_group_tp1_pp0")
    assert ids.tp_groups == ("tp_group_dp0_pp0", "tp_group_dp1_pp0", "tp_group_dp2_pp0")
    assert ids.pp_groups == tuple(f"pp_group_dp{dp}_tp{tp}" for dp in range(3) for tp in range(2))
    assert {*ids.dp_groups, *ids.tp_groups, *ids.pp_groups} <= set(ids.groups())
