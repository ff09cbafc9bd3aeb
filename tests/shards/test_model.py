"""All layers of a rank: who is where, and what happens to gradients that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.shards import LayerShard, LayerType, ModelShards


def linear(layer_id: int, *, is_tied: bool = False) -> LayerShard:
    return LayerShard(
        layer_id=layer_id,
        layer_type=LayerType.LINEAR,
        weight=np.full((2, 3), 1.0, np.float32),
        bias=np.zeros(3, np.float32),
        is_tied=is_tied,
    )


def make_model() -> ModelShards:
    """Return two stages: layers 0 and 1, and an MLP, layer 2."""
    mlp = LayerShard(
        layer_id=2,
        layer_type=LayerType.MLP,
        weight=np.ones((3, 4), np.float32),
        down_projection_weight=np.ones((4, 3), np.float32),
    )
    return ModelShards([[linear(0), linear(1)], [mlp]])


def test_layers_are_found_by_id_by_stage_and_by_key() -> None:
    model = make_model()
    layer = model.get_layer_shard(1)
    assert model.get_stage_layers(0)[1] is layer
    assert model.get_model_shard(0, 1) is layer
    assert model.shards["stage_0_layer_1"] is layer
    assert list(model.shards) == ["stage_0_layer_0", "stage_0_layer_1", "stage_1_layer_2"]
    assert dict(model.layer_mapping) == {0: 0, 1: 0, 2: 1}


def test_sizes_are_those_of_the_arrays() -> None:
    model = make_model()
    assert model.parameters_per_stage == (18, 24)
    assert model.total_parameters == 42
    assert model.memory_usage_bytes() == 42 * 2 * 4


def test_a_stage_lists_all_its_tensors_in_registration_order_and_no_others() -> None:
    model = make_model()
    first = [parameter.name for parameter in model.parameters(0)]
    assert first == ["layer_0_weight", "layer_0_bias", "layer_1_weight", "layer_1_bias"]
    assert [parameter.name for parameter in model.parameters(1)] == ["layer_2_weight", "layer_2_down_projection"]


def test_the_stage_need_not_be_named_where_only_one_has_layers() -> None:
    model = ModelShards([[], [linear(5)], []])
    assert [parameter.name for parameter in model.parameters()] == ["layer_5_weight", "layer_5_bias"]
    assert list(model.parameters(0)) == []
    assert list(ModelShards([[]]).parameters()) == []
    with pytest.raises(UsageError, match=r"stage: expected one of \[0, 1\], which all have layers here"):
        make_model().parameters()


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_does_not_exist_is_refused(stage: int) -> None:
    model = make_model()
    with pytest.raises(UsageError, match=rf"stage: expected 0\.\.1, got {stage}"):
        model.get_stage_layers(stage)
    with pytest.raises(UsageError, match=rf"stage: expected 0\.\.1, got {stage}"):
        model.parameters(stage)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    model = make_model()
    with pytest.raises(UsageError, match=r"layer_id: expected a layer of this rank, one of \[0, 1, 2\], got 7"):
        model.get_layer_shard(7)
    with pytest.raises(UsageError, match=r"layer_id: expected a layer of stage 1, one of \[2\], got 0"):
        model.get_model_shard(1, 0)


def test_gradients_are_replaced_by_copies() -> None:
    model = make_model()
    given = np.full((2, 3), 5.0, np.float32)
    model.update_layer_gradients(0, grad_weight=given, grad_bias=np.ones(3, np.float32))
    given.fill(9.0)
    layer = model.get_layer_shard(0)
    assert (layer.grad_weight == 5.0).all()
    model.update_layer_gradients(0, grad_weight=np.full((2, 3), 2.0, np.float32))
    assert (layer.grad_weight == 2.0).all()
    np.testing.assert_array_equal(layer.grad_bias, np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("layer_id", "wrong", "message"),
    [
        (0, {"grad_bias": np.ones(4, np.float32)}, r"layer_0_bias: expected a gradient of float32\[3\], got float32"),
        (0, {"grad_bias": np.ones(3)}, r"layer_0_bias: expected a gradient of float32\[3\], got float64\[3\]"),
        (0, {"grad_down_projection": np.ones((2, 2))}, "layer_0_down_projection: expected no gradient"),
        (7, {}, "layer_id: expected a layer of this rank"),
    ],
)
def test_a_gradient_that_does_not_fit_changes_nothing(layer_id: int, wrong: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(UsageError, match=message):
        model.update_layer_gradients(layer_id, grad_weight=np.ones((2, 3), np.float32), **wrong)
    assert not model.get_layer_shard(0).grad_weight.any()


def test_descent_uses_every_gradient_and_zeroing_forgets_them() -> None:
    model = make_model()
    for stage in (0, 1):
        for parameter in model.parameters(stage):
            parameter.grad.fill(2.0)
    before = [parameter.value.copy() for stage in (0, 1) for parameter in model.parameters(stage)]
    model.apply_weight_updates(0.25)
    after = [parameter for stage in (0, 1) for parameter in model.parameters(stage)]
    for value, parameter in zip(before, after, strict=True):
        np.testing.assert_array_equal(parameter.value, value - np.float32(0.5))
        assert parameter.value.dtype == np.float32
    model.zero_gradients()
    assert not any(parameter.grad.any() for parameter in after)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_learning_rate_out_of_range_changes_nothing(rate: float) -> None:
    model = make_model()
    with pytest.raises(UsageError, match="learning_rate: expected a finite number of 0 or more"):
        model.apply_weight_updates(rate)
    assert (model.get_layer_shard(0).weight == 1.0).all()


def test_no_stages_and_a_layer_twice_are_refused() -> None:
    with pytest.raises(UsageError, match="pipeline_stages: expected at least one stage"):
        ModelShards([])
    with pytest.raises(UsageError, match="expected each layer once, got layer 1 more than once"):
        ModelShards([[linear(0), linear(1)], [linear(1)]])


def test_ties_join_the_first_and_the_last_stage() -> None:
    model = ModelShards([[linear(0, is_tied=True)], [linear(1)], [linear(2, is_tied=True)]])
    assert [p.name for stage in range(3) for p in model.parameters(stage) if p.placement.tied == "embedding"] == [
        "layer_0_weight",
        "layer_2_weight",
    ]
    with pytest.raises(UsageError, match="layer 1: expected a tied layer in stage 0 or 2, where it is shared, got"):
        ModelShards([[linear(0)], [linear(1, is_tied=True)], [linear(2)]])
    with pytest.raises(UsageError, match=r"expected one tied layer in stage 0, got layers \[0, 1\]"):
        ModelShards([[linear(0, is_tied=True), linear(1, is_tied=True)]])
