"""A model that fails where and when a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.hybrid import Loss, ParallelModel, StageLayers, StagePlace, TransformerModel
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.nn.tensor.group import TensorGroup


class Moment(StrEnum):
    """When it fails."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    WEIGHT = "weight"
    """In the gradient of a parameter, before the last micro-batch adds to it."""


@dataclass(kw_only=True)
class Fault:
    """Raises at ``at``; or does ``what`` instead."""

    at: Moment | None = None
    what: Callable[[Array], None] | None = None

    def strike(self, moment: Moment, x: Array) -> None:
        if self.at is moment:
            if self.what is None:
                raise ZeroDivisionError("on purpose")
            self.what(x)


class FaultyStage(Stage[Any]):
    """``stage``, with a fault."""

    def __init__(self, stage: Stage[Any], fault: Fault) -> None:
        self._stage = stage
        self._fault = fault

    def forward(self, x: Any) -> tuple[Array, Any]:
        y, saved = self._stage.forward(x)
        self._fault.strike(Moment.FORWARD, y)
        return y, saved

    def backward(
        self, saved: Any, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        dx = self._stage.backward(saved, dy, on_gradient, deferred)
        if dx is not None:
            self._fault.strike(Moment.BACKWARD, dx)
        if on_gradient is None:
            self._fault.strike(Moment.WEIGHT, self._stage.parameters()[-1].grad)
        return dx

    def parameters(self) -> tuple[Parameter, ...]:
        return self._stage.parameters()

    def generators(self) -> tuple[np.random.Generator, ...]:
        return self._stage.generators()


@dataclass(frozen=True, kw_only=True)
class FaultyModel(ParallelModel):
    """``model``, with the same fault in every block."""

    model: TransformerModel
    fault: Fault = field(default_factory=Fault)

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.model.identity

    def check(self, config: ThreeDParallelismConfig) -> None:
        self.model.check(config)

    def build(self, place: StagePlace, group: TensorGroup) -> StageLayers:
        layers = self.model.build(place, group)
        return replace(layers, blocks=[FaultyStage(block, self.fault) for block in layers.blocks])

    def make_loss(self, group: TensorGroup, scale: Callable[[], float]) -> Loss:
        loss = self.model.make_loss(group, scale)

        def faulty(logits: Array, targets: Any) -> tuple[float, Array]:
            value, gradient = loss(logits, targets)
            self.fault.strike(Moment.LOSS, gradient)
            return value, gradient

        return faulty

    def count(self, targets: Any) -> int:
        return self.model.count(targets)
