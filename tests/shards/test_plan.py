"""Cutting whole layers: the parts compute together what the whole computes."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.core.config.placement import Replication
from asyncpar.errors import UsageError
from asyncpar.shards import (
    CommunicationPattern,
    LayerShard,
    LayerType,
    ModelShards,
    ShardStrategy,
    create_tp_sharding_plan,
)
from asyncpar.shards.layer import Array
from asyncpar.shards.plan import split_bounds, split_sizes

NONE, REDUCE, GATHER = CommunicationPattern.NONE, CommunicationPattern.ALL_REDUCE, CommunicationPattern.ALL_GATHER


def make_layer(
    layer_type: LayerType = LayerType.LINEAR,
    shape: tuple[int, ...] = (4, 7),
    *,
    down: tuple[int, ...] | None = None,
    strategy: ShardStrategy | None = None,
    bias: int | None = None,
) -> LayerShard:
    rng = np.random.default_rng(0)
    return LayerShard(
        layer_id=0,
        layer_type=layer_type,
        weight=rng.normal(size=shape),
        bias=rng.normal(size=shape[-1] if bias is None else bias),
        down_projection_weight=None if down is None else rng.normal(size=down),
        strategy=strategy,
        replication=Replication.PARTIAL,
    )


def cut_all(layer: LayerShard, tp_size: int) -> list[LayerShard]:
    plan = create_tp_sharding_plan([layer], tp_size).layer(layer.layer_id)
    return [plan.cut(layer, rank) for rank in range(tp_size)]


def outputs(layer: LayerShard, x: Array) -> Array:
    assert layer.bias is not None
    return x @ layer.weight + layer.bias


def project_down(layer: LayerShard, x: Array) -> Array:
    assert layer.down_projection_weight is not None
    return np.tanh(outputs(layer, x)) @ layer.down_projection_weight


def test_parts_differ_by_one_at_most() -> None:
    lengths = [stop - start for start, stop in split_bounds(101, 4)]
    assert lengths == [26, 25, 25, 25]
    assert split_bounds(2, 3) == ((0, 1), (1, 2), (2, 2))


@pytest.mark.parametrize("tp_size", [1, 2, 3, 7])
def test_columns_together_are_the_whole(tp_size: int) -> None:
    layer = make_layer()
    parts = cut_all(layer, tp_size)
    x = np.random.default_rng(1).normal(size=(5, 4))
    np.testing.assert_allclose(np.concatenate([outputs(part, x) for part in parts], axis=1), outputs(layer, x))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_sum_over_row_parts_is_the_whole(tp_size: int) -> None:
    layer = make_layer(strategy=ShardStrategy.ROW_PARALLEL)
    x = np.random.default_rng(1).normal(size=(5, 4))
    parts = cut_all(layer, tp_size)
    bounds = split_bounds(4, tp_size)
    products = [x[:, start:stop] @ part.weight for (start, stop), part in zip(bounds, parts, strict=True)]
    np.testing.assert_allclose(np.sum(products, axis=0), x @ layer.weight)
    for part in parts:
        np.testing.assert_array_equal(part.bias, layer.bias)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_a_pair_of_maps_is_cut_so_that_the_sum_of_its_parts_is_the_whole(tp_size: int) -> None:
    layer = make_layer(LayerType.MLP, (4, 7), down=(7, 4))
    x = np.random.default_rng(1).normal(size=(5, 4))
    parts = [project_down(part, x) for part in cut_all(layer, tp_size)]
    np.testing.assert_allclose(np.sum(parts, axis=0), project_down(layer, x))


def test_queries_keys_and_values_of_a_head_stay_together() -> None:
    layer = make_layer(LayerType.ATTENTION, (6, 18), down=(6, 6))
    plan = create_tp_sharding_plan([layer], 2).layer(0)
    assert plan.down_bounds == ((0, 3), (3, 6))
    assert plan.bounds == ((0, 9), (9, 18))


def test_a_vocabulary_is_cut_by_rows_and_norms_are_not_cut() -> None:
    table = make_layer(LayerType.EMBEDDING, (5, 2))
    assert [part.weight.shape for part in cut_all(table, 2)] == [(3, 2), (2, 2)]
    norm = make_layer(shape=(6,))
    for part in cut_all(norm, 3):
        np.testing.assert_array_equal(part.weight, norm.weight)
        assert part.weight is not norm.weight
        assert part.replication is Replication.PARTIAL


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        (make_layer(), GATHER, REDUCE),
        (make_layer(LayerType.MLP, (4, 8), down=(8, 4)), REDUCE, REDUCE),
        (make_layer(strategy=ShardStrategy.ROW_PARALLEL), REDUCE, GATHER),
        (make_layer(LayerType.EMBEDDING, (8, 4)), REDUCE, NONE),
        (make_layer(shape=(4,)), NONE, NONE),
    ],
    ids=["column", "pair", "row", "vocabulary", "replicated"],
)
def test_the_communication_of_each_strategy(
    layer: LayerShard, forward: CommunicationPattern, backward: CommunicationPattern
) -> None:
    plan = create_tp_sharding_plan([layer], 2).layer(0)
    assert (plan.forward, plan.backward) == (forward, backward)
    alone = create_tp_sharding_plan([layer], 1).layer(0)
    assert (alone.forward, alone.backward) == (NONE, NONE)


def test_a_dimension_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tp_size: layer 0 \(column_parallel\) of shape \[4, 7\] cannot be cut along"):
        create_tp_sharding_plan([make_layer()], 8)
    with pytest.raises(UsageError, match="tp_size: expected 1 or more, got 0"):
        create_tp_sharding_plan([make_layer()], 0)
    with pytest.raises(UsageError, match=r"shape \[7\] cannot be cut along dimension 1"):
        create_tp_sharding_plan([make_layer(shape=(7,), strategy=ShardStrategy.COLUMN_PARALLEL)], 2)


def test_a_rank_or_layer_that_is_not_planned_is_refused() -> None:
    layer = make_layer()
    plan = ModelShards([[layer]]).create_tp_sharding_plan(2)
    assert plan.tp_size == 2
    with pytest.raises(UsageError, match=r"layer_id: expected a layer of the plan, one of \[0\], got 5"):
        plan.layer(5)
    with pytest.raises(UsageError, match=r"tp_rank: expected 0\.\.1, got 2"):
        plan.layer(0).cut(layer, 2)


@pytest.mark.parametrize(
    ("length", "parts", "sizes"), [(101, 4, [26, 25, 25, 25]), (8, 4, [2] * 4), (2, 3, [1, 1, 0]), (0, 2, [0, 0])]
)
def test_sizes_differ_by_one_at_most(length: int, parts: int, sizes: list[int]) -> None:
    assert split_sizes(length, parts) == sizes


@pytest.mark.parametrize(("length", "parts", "name"), [(-1, 2, "length"), (3, 0, "parts")])
def test_sizes_that_cannot_be_are_refused(length: int, parts: int, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected"):
        split_sizes(length, parts)
