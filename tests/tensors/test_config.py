"""Distribution of a model over devices: every field has an effect, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.backends import CommunicationBackend
from asyncpar.errors import UsageError
from asyncpar.tensors import DeviceMesh, ModelParallelConfig, ModelParallelStrategy


def config(devices: int, strategy: str, **more: Any) -> ModelParallelConfig:
    settings = {"device_ids": tuple(range(devices)), **more}
    return ModelParallelConfig(num_devices=devices, strategy=ModelParallelStrategy(strategy), **settings)


def test_defaults_are_those_of_the_contract() -> None:
    default = ModelParallelConfig()
    assert (default.num_devices, default.strategy, default.device_ids) == (1, ModelParallelStrategy.PIPELINE, (0,))
    assert (default.pipeline_depth, default.tensor_split_dim, default.gradient_checkpointing) == (None, None, False)
    assert default.comm_backend is CommunicationBackend.NATIVE


def test_strategies_lay_devices_out() -> None:
    assert config(3, "pipeline", device_ids=(4, 2, 7)).mesh() == DeviceMesh((3,), ("pp",), (4, 2, 7))
    assert config(4, "tensor").mesh() == DeviceMesh((2, 2), ("tp_row", "tp_column"))
    assert config(3, "tensor").mesh() == DeviceMesh((2, 2), ("tp_row", "tp_column"), range(3))
    assert config(4, "hybrid").mesh() == DeviceMesh((2, 2), ("pp", "tp"))


def test_the_depth_of_a_hybrid_is_the_number_of_rows() -> None:
    assert config(8, "hybrid", pipeline_depth=4).mesh().sizes == {"pp": 4, "tp": 2}


@pytest.mark.parametrize(("devices", "depth"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (8, 4), (9, 3), (12, 4)])
def test_by_default_a_hybrid_is_as_square_as_its_devices_allow(devices: int, depth: int) -> None:
    assert config(devices, "hybrid").mesh().sizes == {"pp": depth, "tp": devices // depth}


def test_more_stages_than_pipeline_devices_are_chunks() -> None:
    assert config(2, "pipeline").stages == 2
    deep = config(2, "pipeline", pipeline_depth=6)
    assert deep.stages == 6
    assert deep.parallelism().num_model_chunks == 3


def test_parallelism_says_the_same_in_three_dimensions() -> None:
    three_d = config(4, "hybrid", gradient_checkpointing=True).parallelism(num_layers=8)
    assert (three_d.dp_size, three_d.tp_size, three_d.pp_size, three_d.num_layers) == (1, 2, 2, 8)
    assert three_d.enable_gradient_checkpointing
    assert not config(4, "tensor").parallelism().enable_gradient_checkpointing
    assert [config(3, strategy).parallelism().tp_size for strategy in ("tensor", "pipeline")] == [3, 1]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_ranks_have_the_same_place_in_mesh_and_parallelism(devices: int) -> None:
    hybrid = config(devices, "hybrid")
    order, mesh = hybrid.parallelism().rank_order(), hybrid.mesh()
    for rank in range(devices):
        place = order.coordinates(rank)
        assert mesh.coordinates_of(rank) == (place["pp"], place["tp"])


def test_tensors_are_split_along_dimension_0_unless_said_otherwise() -> None:
    assert config(2, "tensor").split_dim == 0
    assert config(2, "tensor", tensor_split_dim=1).split_dim == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "num_devices: expected at least 1, got 0"),
        ({"num_devices": 2}, r"device_ids: expected 2, one for each of num_devices, got 1: \[0\]"),
        ({"num_devices": 2, "device_ids": (1, 1)}, r"device_ids: expected different numbers .* got \[1, 1\]"),
        ({"device_ids": (-1,)}, r"device_ids: expected different numbers of 0 or more, got \[-1\]"),
        ({"strategy": "diagonal"}, "strategy: expected one of pipeline, tensor, hybrid, got 'diagonal'"),
        ({"tensor_split_dim": -1}, "tensor_split_dim: expected 0 or more, or None, got -1"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing: expected True or False, got 1"),
        ({"comm_backend": ""}, "comm_backend: expected the name of a backend, got ''"),
        ({"pipeline_depth": 0}, "pipeline_depth: expected at least 1, or None, got 0"),
    ],
)
def test_what_makes_no_sense_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelParallelConfig(**changes)


@pytest.mark.parametrize(
    ("strategy", "depth", "message"),
    [
        ("tensor", 3, "expected 1 or None with strategy tensor, got 3"),
        ("pipeline", 4, "expected a multiple of num_devices = 3, got 4"),
        ("hybrid", 2, "expected a divisor of num_devices = 3, got 2"),
    ],
)
def test_a_depth_that_does_not_fit_the_devices_is_an_error(strategy: str, depth: int, message: str) -> None:
    with pytest.raises(UsageError, match=f"^pipeline_depth: {message}$"):
        config(3, strategy, pipeline_depth=depth)
