"""Every name, default and value of the contract exists under the import path that the README gives."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import ProcessGroupIds, RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.errors import UsageError
from asyncpar.multinode import MultiNodeConfig
from asyncpar.nn import Initializer, Linear
from asyncpar.parallel import DataParallel
from asyncpar.shards import split_sizes
from asyncpar.tensors import DistributedTensor, ModelParallelConfig, ModelParallelStrategy, TensorPartition
from asyncpar.zero import ZeROStage, memory_reduction

CONTRACT: dict[str, Any] = json.loads((Path(__file__).parent / "goldens" / "contract.json").read_text())
"""By module: names, with their members (``name()`` is to be callable), parameters in order, and defaults."""

TYPES = [(module, name) for module, names in CONTRACT.items() for name in names]


def resolve(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def entries(part: str) -> list[Any]:
    return [
        pytest.param(module, name, CONTRACT[module][name][part], id=f"{module}.{name}")
        for module, name in TYPES
        if part in CONTRACT[module][name]
    ]


def members_of(kind: Any) -> set[str]:
    """Return what an instance of ``kind`` has, also what its methods set."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return {*dir(kind), *fields, *re.findall(r"self\.(\w+)", inspect.getsource(kind))}


@pytest.mark.parametrize(("module", "name"), TYPES, ids=str)
def test_every_name_can_be_imported_and_is_public(module: str, name: str) -> None:
    assert resolve(module, name) is not None
    assert name in importlib.import_module(module).__all__


@pytest.mark.parametrize(("module", "name", "members"), entries("members"))
def test_every_member_is_there(module: str, name: str, members: list[str]) -> None:
    kind = resolve(module, name)
    there = members_of(kind)
    assert [member for member in members if member.removesuffix("()") not in there] == []
    methods = [member.removesuffix("()") for member in members if member.endswith("()")]
    assert [method for method in methods if not callable(getattr(kind, method))] == []


@pytest.mark.parametrize(("module", "name", "parameters"), entries("parameters"))
def test_parameters_have_the_names_of_the_contract(module: str, name: str, parameters: list[str]) -> None:
    got = list(inspect.signature(resolve(module, name)).parameters)
    assert [parameter for parameter in parameters if parameter not in got] == []


@pytest.mark.parametrize(("module", "name", "positional"), entries("positional"))
def test_constructors_take_their_arguments_by_position(module: str, name: str, positional: list[str]) -> None:
    signature = inspect.signature(resolve(module, name))
    assert list(signature.parameters)[: len(positional)] == positional
    signature.bind_partial(*positional)


@pytest.mark.parametrize(("module", "name", "defaults"), entries("defaults"))
def test_defaults_are_those_of_the_contract(module: str, name: str, defaults: Mapping[str, Any]) -> None:
    default = resolve(module, name)()
    got = {field: getattr(default, field) for field in defaults}
    plain = {field: list(value) if isinstance(value, tuple) else value for field, value in got.items()}
    assert plain == defaults


@pytest.mark.parametrize(("module", "name", "choices"), entries("choices"))
def test_enumerations_have_all_their_members(module: str, name: str, choices: list[str]) -> None:
    assert [choice for choice in choices if not hasattr(resolve(module, name), choice)] == []


# -- values ------------------------------------------------------------------------------------------------------------

CUBE = ThreeDParallelismConfig(dp_size=2, tp_size=2, pp_size=2)


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0, 0)), (3, (0, 1, 1)), (5, (1, 0, 1)), (7, (1, 1, 1))])
def test_ranks_have_the_places_of_the_contract(rank: int, place: tuple[int, int, int]) -> None:
    mapping = RankMapping(CUBE, rank)
    assert (mapping.dp_rank, mapping.tp_rank, mapping.pp_rank) == place
    assert mapping.from_3d_coords(*place) == RankMapping.from_3d_coords(CUBE, *place) == rank


def test_layers_per_stage_and_the_error_of_a_wrong_world() -> None:
    assert ThreeDParallelismConfig(pp_size=4).stage_layers() == (6, 6, 6, 6)
    with pytest.raises(UsageError, match="layers"):
        ThreeDParallelismConfig(pp_size=3, num_layers=25).validate(3)
    message = r"3D parallelism configuration mismatch: expected 8 devices \(2\*2\*2\), got 4"
    with pytest.raises(UsageError, match=message):
        CUBE.validate(4)
    with pytest.raises(UsageError, match="micro_batch_size"):
        ThreeDParallelismConfig(micro_batch_size=0)


def test_groups_have_the_names_of_the_contract() -> None:
    ids = ProcessGroupIds(CUBE)
    names = ids.get_dp_group_id(0, 1), ids.get_tp_group_id(1, 0), ids.get_pp_group_id(1, 1)
    assert names == ("dp_group_tp0_pp1", "tp_group_dp1_pp0", "pp_group_dp1_tp1")


def test_parts_of_tensors_are_those_of_the_contract() -> None:
    parts = [TensorPartition.of((5,), 0, 4, rank) for rank in range(4)]
    assert [(part.start_idx, part.end_idx) for part in parts] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    shard = DistributedTensor.from_global(np.zeros((128, 512)), 0, 4, 0)
    assert (shard.partition.start_idx, shard.partition.end_idx, shard.local_shape) == (0, 32, (32, 512))
    with pytest.raises(UsageError, match="Split dimension 3 out of bounds for tensor with 2 dimensions"):
        TensorPartition.of((2, 2), 3, 2, 0)
    assert split_sizes(101, 4) == [26, 25, 25, 25]


def test_meshes_are_those_of_the_contract() -> None:
    mesh = ModelParallelConfig(num_devices=4, strategy=ModelParallelStrategy.TENSOR, device_ids=(0, 1, 2, 3)).mesh()
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    assert [mesh.device_at(place) for place in places] == [0, 1, 2, 3, None]


def test_nodes_are_those_of_the_contract() -> None:
    config = MultiNodeConfig.new(4, 8, 2, 3)
    assert (config.global_rank, config.world_size(), config.is_master()) == (19, 32, False)
    assert MultiNodeConfig.new(3, 4, 1, 2).node_local_ranks() == [4, 5, 6, 7]


def test_shares_of_zero_are_those_of_the_contract() -> None:
    reductions = [memory_reduction(ZeROStage.of(stage), 4) for stage in (1, 2, 3)]
    assert reductions == pytest.approx([0.25, 0.5, 0.75])
    assert [stop - start for start, stop in ceil_chunks(7, 3)] == [3, 3, 1]
    assert ceil_chunks(8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_devices_are_needed() -> None:
    with pytest.raises(UsageError, match="No devices provided"):
        DataParallel(Linear("layer", 2, 2, initializer=Initializer.from_seed(0)), [])
