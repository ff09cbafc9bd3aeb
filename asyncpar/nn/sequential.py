"""Stages one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncpar.core.array_pool import ArrayPool
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage


class Sequential(Stage[list[Any]]):
    """Feed each stage's output to the next.

    Two stages may share one parameter, which is then listed once.  Otherwise names must be unique.
    """

    def __init__(self, stages: Sequence[Stage[Any]]) -> None:
        if not stages:
            raise UsageError("stages: expected at least one stage, got none")
        self.stages = tuple(stages)
        self.parameters()  # refuses two with the same name

    def forward(self, x: Any) -> tuple[Array, list[Any]]:
        saved: list[Any] = []
        for stage in self.stages:
            x, kept = stage.forward(x)
            saved.append(kept)
        return x, saved

    def forward_again(self, x: Any) -> tuple[Array, list[Any]]:
        saved: list[Any] = []
        for stage in self.stages:
            x, kept = stage.forward_again(x)
            saved.append(kept)
        return x, saved

    def backward(
        self, saved: list[Any], dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        """Saved values are released layer by layer: ``saved`` is empty afterwards.

        ``on_gradient`` and ``deferred`` are those of ``Stage.backward``.
        """
        gradient: Array | None = dy
        for stage in reversed(self.stages):
            if gradient is None:
                raise UsageError("stages: only the first stage may have an input without gradient")
            gradient = stage.backward(saved.pop(), gradient, on_gradient, deferred)
        return gradient

    def use_memory(self, memory: ArrayPool) -> None:
        super().use_memory(memory)
        for stage in self.stages:
            stage.use_memory(memory)

    def parameters(self) -> tuple[Parameter, ...]:
        return _by_name(self.stages)

    def generators(self) -> tuple[np.random.Generator, ...]:
        return tuple(generator for stage in self.stages for generator in stage.generators())


def _by_name(stages: Sequence[Stage[Any]]) -> tuple[Parameter, ...]:
    seen: dict[str, Parameter] = {}
    for stage in stages:
        for parameter in stage.parameters():
            if seen.setdefault(parameter.name, parameter) is not parameter:
                raise UsageError(f"stages: two parameters are named {parameter.name!r}")
    return tuple(seen.values())
