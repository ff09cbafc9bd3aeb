"""Layers that save only their input, and recompute the rest when it is needed (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage

GeneratorState = Mapping[str, Any]

_KEPT_IN_STANDARD: Final = 2
_KEPT_IN_AGGRESSIVE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedSaved:
    """The input of a layer, and the initial state of its generators."""

    x: Any
    states: tuple[GeneratorState, ...]


class Recomputed(Stage[RecomputedSaved]):
    """``stage``, with its forward pass repeated at the beginning of its backward pass, with the same random numbers.

    All results are the same as without it, to the last bit, and so are the generators afterwards.  It costs one more
    forward pass per backward pass.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        self.stage = stage

    def forward(self, x: Any) -> tuple[Array, RecomputedSaved]:
        states = _states(self.stage)
        y, _ = self.stage.forward(x)
        return y, RecomputedSaved(x=x, states=states)

    def backward(
        self,
        saved: RecomputedSaved,
        dy: Array,
        on_gradient: OnGradient | None = None,
        deferred: Deferred | None = None,
    ) -> Array | None:
        afterwards = _states(self.stage)
        _restore(self.stage, saved.states)
        try:
            _, kept = self.stage.forward_again(saved.x)
        finally:
            _restore(self.stage, afterwards)
        return self.stage.backward(kept, dy, on_gradient, deferred)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.stage.parameters()

    def generators(self) -> tuple[np.random.Generator, ...]:
        return self.stage.generators()


def apply_memory_strategy(
    strategy: MemoryOptimizationStrategy, layers: Sequence[Stage[Any]], *, recompute_all: bool = False
) -> tuple[Stage[Any], ...]:
    """Return ``layers``, with those wrapped whose activations ``strategy`` does not keep.

    BASIC keeps all, STANDARD every second, AGGRESSIVE every fourth, counted from the end: activations that are needed
    first are kept.  EXTREME is like AGGRESSIVE; the kept ones go to disk, which is the task of ``MemoryManager``.
    ``recompute_all`` (``enable_gradient_checkpointing``) keeps none.
    """
    match MemoryOptimizationStrategy(strategy):
        case MemoryOptimizationStrategy.BASIC:
            every = 1
        case MemoryOptimizationStrategy.STANDARD:
            every = _KEPT_IN_STANDARD
        case _:
            every = _KEPT_IN_AGGRESSIVE
    last = len(layers) - 1
    return tuple(
        layer if not recompute_all and (last - place) % every == 0 else _recomputed(layer)
        for place, layer in enumerate(layers)
    )


def _recomputed(layer: Stage[Any]) -> Stage[Any]:
    if isinstance(layer, Recomputed):
        raise UsageError("layers: expected layers that are not recomputed yet, got one that is")
    return Recomputed(layer)


def _states(stage: Stage[Any]) -> tuple[GeneratorState, ...]:
    return tuple(generator.bit_generator.state for generator in stage.generators())


def _restore(stage: Stage[Any], states: Sequence[GeneratorState]) -> None:
    for generator, state in zip(stage.generators(), states, strict=True):
        generator.bit_generator.state = state
