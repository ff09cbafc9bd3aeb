"""All layers on one rank, by pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.shards.layer import Array, LayerShard, ShardParameter
from asyncpar.shards.plan import TensorParallelShardingPlan, create_tp_sharding_plan


class ModelShards:
    """The layers of each pipeline stage, first stage first, in registration order.

    Stages without layers on this rank are empty: a rank of a pipeline normally fills in only its own, and figures count
    only present layers.  ``shards`` has every layer by ``stage_{stage}_layer_{layer_id}``, ``layer_mapping`` the stage
    of each layer.
    """

    def __init__(self, pipeline_stages: Sequence[Sequence[LayerShard]]) -> None:
        if not pipeline_stages:
            raise UsageError("pipeline_stages: expected at least one stage, got none")
        self.pipeline_stages: tuple[tuple[LayerShard, ...], ...] = tuple(map(tuple, pipeline_stages))
        placed = [(stage, layer) for stage, layers in enumerate(self.pipeline_stages) for layer in layers]
        self.layer_mapping: Mapping[int, int] = MappingProxyType({layer.layer_id: stage for stage, layer in placed})
        if len(self.layer_mapping) != len(placed):
            ids = sorted(layer.layer_id for _, layer in placed)
            twice = next(one for one, other in pairwise(ids) if one == other)
            raise UsageError(f"pipeline_stages: expected each layer once, got layer {twice} more than once")
        self.shards: Mapping[str, LayerShard] = MappingProxyType(
            {f"stage_{stage}_layer_{layer.layer_id}": layer for stage, layer in placed}
        )
        self._layers = {layer.layer_id: layer for _, layer in placed}
        self._check_ties()

    @property
    def parameters_per_stage(self) -> tuple[int, ...]:
        """Number of values on this rank by stage."""
        return tuple(sum(layer.parameter_count for layer in layers) for layers in self.pipeline_stages)

    @property
    def total_parameters(self) -> int:
        """Number of values on this rank."""
        return sum(self.parameters_per_stage)

    def get_layer_shard(self, layer_id: int) -> LayerShard:
        """Return one layer."""
        if layer_id not in self._layers:
            raise UsageError(f"layer_id: expected a layer of this rank, one of {list(self._layers)}, got {layer_id}")
        return self._layers[layer_id]

    def get_stage_layers(self, stage: int) -> tuple[LayerShard, ...]:
        """Return the layers of one stage; none if this rank has none of it."""
        if not 0 <= stage < len(self.pipeline_stages):
            raise UsageError(f"stage: expected 0..{len(self.pipeline_stages) - 1}, got {stage}")
        return self.pipeline_stages[stage]

    def get_model_shard(self, stage: int, layer_id: int) -> LayerShard:
        """Return layer ``layer_id``, which must be in ``stage``."""
        layers = self.get_stage_layers(stage)
        key = f"stage_{stage}_layer_{layer_id}"
        if key not in self.shards:
            there = [layer.layer_id for layer in layers]
            raise UsageError(f"layer_id: expected a layer of stage {stage}, one of {there}, got {layer_id}")
        return self.shards[key]

    def parameters(self, stage: int | None = None) -> Iterator[ShardParameter]:
        """Yield the tensors of one stage, in registration order.

        ``stage`` may be left out where at most one has layers.
        """
        if stage is None:
            filled = [stage for stage, layers in enumerate(self.pipeline_stages) if layers]
            if len(filled) > 1:
                raise UsageError(f"stage: expected one of {filled}, which all have layers here, got none")
            stage = filled[0] if filled else 0
        return (parameter for layer in self.get_stage_layers(stage) for parameter in layer.parameters())

    def update_layer_gradients(
        self,
        layer_id: int,
        *,
        grad_weight: Array | None = None,
        grad_bias: Array | None = None,
        grad_down_projection: Array | None = None,
    ) -> None:
        """Replace ``grad_weight``, ``grad_bias`` and ``grad_down_projection``, where given, by copies.

        Either all are replaced, or none if one does not fit.
        """
        layer = self.get_layer_shard(layer_id)
        own = {parameter.name: parameter.grad for parameter in layer.parameters()}
        given = {"weight": grad_weight, "bias": grad_bias, "down_projection": grad_down_projection}
        pairs: list[tuple[Array, Array]] = []
        for tensor, gradient in given.items():
            if gradient is not None:
                name = layer.name_of(tensor)
                _check_gradient(name, own.get(name), gradient)
                pairs.append((own[name], gradient))
        for target, gradient in pairs:
            np.copyto(target, gradient)

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for parameter in self._every_parameter():
            parameter.grad.fill(0.0)

    def apply_weight_updates(self, learning_rate: float) -> None:
        """Update every value with its gradient: plain gradient descent."""
        if not (learning_rate >= 0.0 and math.isfinite(learning_rate)):
            raise UsageError(f"learning_rate: expected a finite number of 0 or more, got {learning_rate}")
        for parameter in self._every_parameter():
            parameter.value[...] -= learning_rate * parameter.grad

    def memory_usage_bytes(self) -> int:
        """Return the bytes of values and gradients on this rank."""
        return sum(layer.nbytes for layer in self._layers.values())

    def create_tp_sharding_plan(self, tp_size: int) -> TensorParallelShardingPlan:
        """Plan how these whole layers are cut over ``tp_size`` ranks.  See ``plan.py``."""
        return create_tp_sharding_plan(self._layers.values(), tp_size)

    def _every_parameter(self) -> Iterator[ShardParameter]:
        return (parameter for layer in self._layers.values() for parameter in layer.parameters())

    def _check_ties(self) -> None:
        last = len(self.pipeline_stages) - 1
        for stage, layers in enumerate(self.pipeline_stages):
            tied = [layer.layer_id for layer in layers if layer.is_tied]
            if tied and stage not in (0, last):
                raise UsageError(
                    f"layer {tied[0]}: expected a tied layer in stage 0 or {last}, where it is shared, "
                    f"got stage {stage}"
                )
            if len(tied) > 1:
                raise UsageError(f"pipeline_stages: expected one tied layer in stage {stage}, got layers {tied}")


def _check_gradient(name: str, own: Array | None, given: Array) -> None:
    if own is None:
        raise UsageError(f"{name}: expected no gradient, as there is no such tensor, got one of {list(given.shape)}")
    if own.shape != given.shape or own.dtype != given.dtype:
        raise UsageError(
            f"{name}: expected a gradient of {own.dtype}{list(own.shape)}, got {given.dtype}{list(given.shape)}"
        )
