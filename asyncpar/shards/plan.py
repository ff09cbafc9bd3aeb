"""Plans that partition whole layers over tensor-parallel ranks, with their traffic: pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from types import MappingProxyType

from asyncpar.errors import UsageError
from asyncpar.shards.layer import Array, LayerShard, LayerType, ShardStrategy


class CommunicationPattern(StrEnum):
    """The exchange of tensor-parallel ranks in one pass through a layer with whole input and output activations."""

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensorParallelPlan:
    """The partition of one layer.

    Rank ``r`` holds ``bounds[r]`` (start, stop) of the weight along ``split_dim``, and ``down_bounds[r]`` of the rows
    of the down projection; ``split_dim`` is None, and there are no bounds, if everything is replicated.
    """

    layer_id: int
    layer_type: LayerType
    strategy: ShardStrategy
    split_dim: int | None
    bounds: tuple[tuple[int, int], ...]
    down_bounds: tuple[tuple[int, int], ...]
    forward: CommunicationPattern
    backward: CommunicationPattern

    def cut(self, layer: LayerShard, tp_rank: int) -> LayerShard:
        """Return copies of the part of ``tp_rank`` of the whole ``layer``; gradients start at zero."""
        weight, bias, down = layer.weight, layer.bias, layer.down_projection_weight
        if self.split_dim is not None:
            if not 0 <= tp_rank < len(self.bounds):
                raise UsageError(f"tp_rank: expected 0..{len(self.bounds) - 1}, got {tp_rank}")
            part = slice(*self.bounds[tp_rank])
            weight = weight[:, part] if self.split_dim == 1 else weight[part]
            if self.strategy is ShardStrategy.COLUMN_PARALLEL:
                bias = None if bias is None else bias[part]
                down = None if down is None else down[slice(*self.down_bounds[tp_rank])]
        return LayerShard(
            layer_id=layer.layer_id,
            layer_type=layer.layer_type,
            weight=weight.copy(),
            bias=None if bias is None else bias.copy(),
            down_projection_weight=None if down is None else down.copy(),
            strategy=self.strategy,
            replication=layer.replication,
            is_tied=layer.is_tied,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelShardingPlan:
    """The plan of every layer, by layer id, in registration order."""

    tp_size: int
    layers: Mapping[int, LayerTensorParallelPlan]

    def layer(self, layer_id: int) -> LayerTensorParallelPlan:
        """Return the plan of one layer."""
        if layer_id not in self.layers:
            raise UsageError(f"layer_id: expected a layer of the plan, one of {list(self.layers)}, got {layer_id}")
        return self.layers[layer_id]


def create_tp_sharding_plan(layers: Iterable[LayerShard], tp_size: int) -> TensorParallelShardingPlan:
    """Plan how the whole ``layers`` are cut over ``tp_size`` ranks.

    Parts differ by at most one, larger ones first.  Columns go with the rows of the down projection that take them: if
    there are k times as many columns, k neighbours go with each row; so attention weights must be laid out by heads.
    Raises ``UsageError`` if a dimension is shorter than ``tp_size``.
    """
    if tp_size < 1:
        raise UsageError(f"tp_size: expected 1 or more, got {tp_size}")
    plans = {layer.layer_id: _plan_layer(layer, tp_size) for layer in layers}
    return TensorParallelShardingPlan(tp_size=tp_size, layers=MappingProxyType(plans))


def split_sizes(length: int, parts: int) -> list[int]:
    """Return the lengths of ``parts`` parts, which differ by at most one, larger ones first: 101 by 4 is 26 25 25 25.

    Raises ``UsageError`` for a negative length and for no parts.
    """
    if length < 0:
        raise UsageError(f"length: expected 0 or more, got {length}")
    if parts < 1:
        raise UsageError(f"parts: expected 1 or more, got {parts}")
    each, rest = divmod(length, parts)
    return [each + (part < rest) for part in range(parts)]


def split_bounds(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each of ``parts`` parts: lengths differ by at most one, larger ones first."""
    stops = list(accumulate(split_sizes(length, parts)))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def _plan_layer(layer: LayerShard, tp_size: int) -> LayerTensorParallelPlan:
    strategy = layer.effective_strategy
    split_dim = None if strategy is ShardStrategy.REPLICATED else int(strategy is ShardStrategy.COLUMN_PARALLEL)
    bounds: tuple[tuple[int, int], ...] = ()
    down_bounds: tuple[tuple[int, int], ...] = ()
    if split_dim is not None:
        _check_dimension(layer, layer.weight, split_dim, tp_size)
        bounds = split_bounds(layer.weight.shape[split_dim], tp_size)
        down = layer.down_projection_weight
        if down is not None:
            _check_dimension(layer, down, 0, tp_size)
            each = layer.weight.shape[1] // down.shape[0]
            down_bounds = split_bounds(down.shape[0], tp_size)
            bounds = tuple((start * each, stop * each) for start, stop in down_bounds)
    forward, backward = _patterns(strategy, has_down=bool(down_bounds), tp_size=tp_size)
    return LayerTensorParallelPlan(
        layer_id=layer.layer_id,
        layer_type=layer.layer_type,
        strategy=strategy,
        split_dim=split_dim,
        bounds=bounds,
        down_bounds=down_bounds,
        forward=forward,
        backward=backward,
    )


def _check_dimension(layer: LayerShard, tensor: Array, dim: int, tp_size: int) -> None:
    if tensor.ndim <= dim or tensor.shape[dim] < tp_size:
        raise UsageError(
            f"tp_size: layer {layer.layer_id} ({layer.effective_strategy}) of shape {list(tensor.shape)} "
            f"cannot be cut along dimension {dim} into {tp_size} parts"
        )


def _patterns(
    strategy: ShardStrategy, *, has_down: bool, tp_size: int
) -> tuple[CommunicationPattern, CommunicationPattern]:
    """Return the exchanges of forward and backward passes.

    Column and down projection are Megatron-LM's pair (Shoeybi et al. 2019): one all-reduce in each direction.
    """
    none, reduce, gather = CommunicationPattern.NONE, CommunicationPattern.ALL_REDUCE, CommunicationPattern.ALL_GATHER
    if tp_size == 1:
        return none, none
    match strategy:
        case ShardStrategy.COLUMN_PARALLEL:
            return (reduce if has_down else gather), reduce
        case ShardStrategy.ROW_PARALLEL:
            return reduce, gather
        case ShardStrategy.VOCAB_PARALLEL:
            return reduce, none
        case ShardStrategy.REPLICATED:
            return none, none
