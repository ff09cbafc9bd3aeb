"""Every name that the contract has is there as it is written there, also where another reads better, and works."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

import asyncpar.hybrid
from asyncpar.backends import (
    CommunicationBackend,
    CommunicationGroup,
    CommunicationMetrics,
    CommunicationRuntime,
    OperationMetrics,
)
from asyncpar.core.config import parallel
from asyncpar.errors import UsageError
from asyncpar.hybrid import Placement, Replication, ThreeDParallelismConfig
from asyncpar.multinode import GradientSyncBuffer, MemorySavings, MemoryUsage, MultiNodeConfig
from asyncpar.net.arena.limits import count_cores
from asyncpar.nn import Initializer, Linear
from asyncpar.parallel import create_data_parallel, create_distributed_data_parallel, init_process_group
from asyncpar.pipeline import PipelineSchedule
from asyncpar.tensors import DeviceMesh, ModelParallelConfig, ModelParallelStrategy

CONFIGURATION = [
    "CommunicationStrategy",
    "MemoryOptimizationStrategy",
    "MemoryRequirements",
    "PipelineScheduleType",
    "Placement",
    "ProcessGroupIds",
    "RankMapping",
    "Replication",
    "ThreeDParallelismConfig",
]
COMPONENTS = {"optimizer", "gradient", "parameter", "communication"}


def make_model() -> Linear:
    return Linear("layer", 2, 2, initializer=Initializer.from_seed(0))


# -- where names live --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGURATION)
def test_names_of_the_configuration_have_their_home_beside_it(name: str) -> None:
    assert name in asyncpar.hybrid.__all__
    assert getattr(asyncpar.hybrid, name).__name__ == name


def test_names_that_have_moved_are_where_their_deprecation_says() -> None:
    sys.modules.pop("asyncpar.config", None)
    with pytest.warns(DeprecationWarning, match=r"import its names from asyncpar\.hybrid$"):
        moved = importlib.import_module("asyncpar.config").parallel.__all__
    assert [name for name in moved if getattr(asyncpar.hybrid, name) is not getattr(parallel, name)] == []
    assert set(moved) <= set(asyncpar.hybrid.__all__)


def test_a_placement_names_its_replication() -> None:
    assert str(Placement(replicated=Replication.WHOLE, tied="embedding")) == "replicated (whole), tied as embedding"


# -- layers of stages --------------------------------------------------------------------------------------------------


def test_layers_per_stage_is_a_field_and_a_call() -> None:
    even = ThreeDParallelismConfig(pp_size=4)
    assert even.layers_per_stage() == even.stage_layers() == (6, 6, 6, 6)
    assert even.layers_per_stage == (6, 6, 6, 6)
    uneven = ThreeDParallelismConfig(pp_size=3, num_layers=7, layers_per_stage=(3, 2, 2))
    assert uneven.layers_per_stage == uneven.layers_per_stage() == (3, 2, 2)
    wrong = ThreeDParallelismConfig(pp_size=3, num_layers=25)
    with pytest.raises(UsageError, match="multiple of"):
        wrong.layers_per_stage()
    assert len(wrong.layers_per_stage) == 0


def test_layers_that_were_not_given_stay_so_in_copies() -> None:
    even = ThreeDParallelismConfig(pp_size=4)
    for other in (copy.copy(even), copy.deepcopy(even), pickle.loads(pickle.dumps(even)), replace(even)):
        assert other == even
        assert hash(other) == hash(even)
        assert other.given_layers is None
    assert replace(even, pp_size=2).layers_per_stage() == (12, 12)
    given = ThreeDParallelismConfig(pp_size=2, num_layers=3, layers_per_stage=(2, 1))
    assert pickle.loads(pickle.dumps(given)).given_layers == replace(given).given_layers == (2, 1)


# -- data parallel -----------------------------------------------------------------------------------------------------


async def test_replicas_are_made_without_devices() -> None:
    replicas = create_data_parallel(make_model())
    expected = tuple(f"cpu:{number}" for number in range(count_cores()))
    assert replicas.devices() == replicas.devices == expected
    replicas.close()


async def test_the_group_of_replicas_is_a_group_and_equals_its_name() -> None:
    runtime, group = await init_process_group(CommunicationBackend.THREAD, 0, 1)
    async with runtime, await create_distributed_data_parallel(make_model(), runtime=runtime) as ddp:
        found = ddp.process_group()
        assert isinstance(found, CommunicationGroup)
        assert found == group == "ddp_main"
        assert found != "another"
        assert {found, "ddp_main"} == {"ddp_main"}
        assert (found.group_id, found.world_size, found.rank, found.devices) == ("ddp_main", 1, 0, ("cpu:0",))
        assert runtime.get_group(found) is found
        assert ddp.local_rank() == 0


async def test_metrics_have_the_sums_of_all_operations() -> None:
    runtime, _ = await init_process_group(CommunicationBackend.THREAD, 0, 1)
    async with runtime:
        assert isinstance(runtime, CommunicationRuntime)
        await runtime.get_group().communicator.all_reduce(np.ones(3))
        counted = runtime.get_metrics().operation_metrics
        assert sum(entry.count for entry in counted.values()) == runtime.get_metrics().operation_count == 1
    one, two = OperationMetrics(count=1, bytes=60, seconds=2.0), OperationMetrics(count=2, bytes=40, seconds=3.0)
    metrics = CommunicationMetrics(operations={"all_reduce": one, "broadcast": two})
    assert (one.total_bytes, one.total_time, one.avg_latency) == (60, 2.0, 2.0)
    assert (metrics.operation_count, metrics.total_bytes, metrics.total_time) == (3, 100, 5.0)
    assert metrics.avg_bandwidth == 20.0
    assert CommunicationMetrics().avg_bandwidth == 0.0


# -- schedules and meshes ----------------------------------------------------------------------------------------------


def test_schedules_take_their_arguments_by_position() -> None:
    kind = asyncpar.hybrid.PipelineScheduleType.GPIPE
    made = PipelineSchedule(2, 4, kind)
    assert made == PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=kind)


@pytest.mark.parametrize("strategy", list(ModelParallelStrategy))
def test_meshes_are_made_for_strategies(strategy: ModelParallelStrategy) -> None:
    ids = (3, 1, 2, 0, 5, 4)
    config = ModelParallelConfig(num_devices=6, strategy=strategy, device_ids=ids)
    assert DeviceMesh(ids, strategy) == config.mesh() == DeviceMesh.of(ids, strategy)


def test_a_mesh_of_a_strategy_takes_nothing_else() -> None:
    with pytest.raises(UsageError, match=r"^axes: expected the names of axes, or one of pipeline, tensor, hybrid"):
        DeviceMesh((2, 2), "rows")
    with pytest.raises(UsageError, match=r"^devices: expected none beside a strategy"):
        DeviceMesh((0, 1), ModelParallelStrategy.TENSOR, (0, 1))


# -- several nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_the_world_of_nodes_has_properties_that_are_methods(rank: int) -> None:
    config = MultiNodeConfig.of_rank(2, 2, rank)
    assert config.world_size == config.world_size() == 4
    assert config.is_master() is bool(config.is_master) is (rank == 0)
    assert repr((config.world_size, config.is_master)) == f"(4, {rank == 0})"


def test_a_buffer_shows_its_gradients() -> None:
    buffer = GradientSyncBuffer()
    assert (dict(buffer.gradients), buffer.accumulation_steps) == ({}, 0)
    for value in (1.0, 2.0):
        buffer.add_gradient("weight", np.full(2, value))
    assert (buffer.gradients["weight"].tolist(), buffer.accumulation_steps) == ([3.0, 3.0], 2)
    buffer.average_gradients()
    assert buffer.gradients["weight"].tolist() == [1.5, 1.5]


def test_memory_has_its_components() -> None:
    usage = MemoryUsage(parameters=1, gradients=2, accumulation=4, optimizer_states=8, buffers=16, residuals=32)
    assert {name: usage[name] for name in usage.components} == {
        "optimizer": 8,
        "gradient": 6,
        "parameter": 1,
        "communication": 48,
    }
    assert usage["total"] == usage.total == 63
    assert set(MemorySavings().components) == COMPONENTS
