"""One layer on one rank: which tensors there are, and which of them other ranks hold, too."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.core.config.placement import Placement, Replication
from asyncpar.errors import UsageError
from asyncpar.shards import LayerShard, LayerType, ShardStrategy

WHOLE = Replication.WHOLE


def mlp(layer_id: int = 3, **settings: object) -> LayerShard:
    return LayerShard(
        layer_id=layer_id,
        layer_type=LayerType.MLP,
        weight=np.ones((4, 8), np.float32),
        bias=np.ones(8, np.float32),
        down_projection_weight=np.ones((8, 4), np.float32),
        **settings,  # type: ignore[arg-type]
    )


def test_all_three_tensors_are_parameters_in_registration_order() -> None:
    names = [parameter.name for parameter in mlp().parameters()]
    assert names == ["layer_3_weight", "layer_3_bias", "layer_3_down_projection"]


def test_tensors_that_are_not_there_are_no_parameters() -> None:
    layer = LayerShard(layer_id=0, layer_type=LayerType.LINEAR, weight=np.ones((2, 2)))
    assert [parameter.name for parameter in layer.parameters()] == ["layer_0_weight"]
    assert layer.grad_bias is None
    assert layer.grad_down_projection is None


def test_gradients_begin_at_zero_and_are_those_of_the_parameters() -> None:
    layer = mlp()
    assert not layer.grad_weight.any()
    assert layer.grad_weight.dtype == np.float32
    weight, bias, down = layer.parameters()
    assert weight.grad is layer.grad_weight
    assert bias.grad is layer.grad_bias
    assert down.grad is layer.grad_down_projection
    assert down.value is layer.down_projection_weight


@pytest.mark.parametrize(
    ("strategy", "replicated"),
    [
        (ShardStrategy.COLUMN_PARALLEL, []),
        (ShardStrategy.ROW_PARALLEL, ["layer_0_bias"]),
        (ShardStrategy.VOCAB_PARALLEL, ["layer_0_bias"]),
        (ShardStrategy.REPLICATED, ["layer_0_weight", "layer_0_bias"]),
    ],
)
def test_only_what_every_rank_has_whole_is_replicated(strategy: ShardStrategy, replicated: list[str]) -> None:
    layer = LayerShard(
        layer_id=0, layer_type=LayerType.LINEAR, weight=np.ones((2, 4)), bias=np.ones(4), strategy=strategy
    )
    assert [p.name for p in layer.parameters() if p.placement.replicated is not None] == replicated
    assert all(p.placement.replicated in (None, WHOLE) for p in layer.parameters())


@pytest.mark.parametrize(
    ("layer_type", "shape", "strategy"),
    [
        (LayerType.LINEAR, (2, 4), ShardStrategy.COLUMN_PARALLEL),
        (LayerType.ATTENTION, (2, 4), ShardStrategy.COLUMN_PARALLEL),
        (LayerType.MLP, (2, 4), ShardStrategy.COLUMN_PARALLEL),
        (LayerType.EMBEDDING, (2, 4), ShardStrategy.VOCAB_PARALLEL),
        (LayerType.LINEAR, (4,), ShardStrategy.REPLICATED),
    ],
)
def test_the_strategy_follows_from_the_type(
    layer_type: LayerType, shape: tuple[int, ...], strategy: ShardStrategy
) -> None:
    assert LayerShard(layer_id=0, layer_type=layer_type, weight=np.ones(shape)).effective_strategy is strategy


def test_a_norm_under_sequence_parallelism_has_partial_gradients() -> None:
    norm = LayerShard(
        layer_id=0,
        layer_type=LayerType.LINEAR,
        weight=np.ones(4),
        bias=np.ones(4),
        replication=Replication.PARTIAL,
    )
    assert {p.placement.replicated for p in norm.parameters()} == {Replication.PARTIAL}


def test_only_the_weight_of_a_tied_layer_is_tied() -> None:
    layer = LayerShard(
        layer_id=0, layer_type=LayerType.EMBEDDING, weight=np.ones((4, 2)), bias=np.ones(2), is_tied=True
    )
    weight, bias = layer.parameters()
    assert weight.placement == Placement(replicated=None, tied="embedding")
    assert bias.placement == Placement(replicated=WHOLE, tied=None)


def test_memory_counts_values_and_gradients() -> None:
    layer = mlp()
    assert layer.parameter_count == 32 + 8 + 32
    assert layer.nbytes == 2 * 4 * 72


def test_integers_cannot_be_trained() -> None:
    with pytest.raises(UsageError, match=r"layer_0_bias: expected a floating dtype, got int64"):
        LayerShard(
            layer_id=0,
            layer_type=LayerType.LINEAR,
            weight=np.ones((2, 2)),
            bias=np.ones(2, np.int64),
        )


def test_a_negative_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="layer_id: expected 0 or more, got -1"):
        mlp(-1)


def test_a_down_projection_after_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="layer_3_down_projection: expected none in a row_parallel layer"):
        mlp(strategy=ShardStrategy.ROW_PARALLEL)


@pytest.mark.parametrize("shape", [(3, 4), (8,), (0, 4)])
def test_a_down_projection_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="the first a divisor of the weight's outputs"):
        LayerShard(
            layer_id=0,
            layer_type=LayerType.MLP,
            weight=np.ones((4, 8)),
            down_projection_weight=np.ones(shape),
        )
