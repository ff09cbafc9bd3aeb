"""Stages one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Stage


class Sequential(Stage[list[Any]]):
    """Feed each stage's output to the next.  Parameter names must be unique."""

    def __init__(self, stages: Sequence[Stage[Any]]) -> None:
        if not stages:
            raise UsageError("stages: expected at least one stage, got none")
        self.stages = tuple(stages)
        seen: set[str] = set()
        for parameter in self.parameters():
            if parameter.name in seen:
                raise UsageError(f"stages: two parameters are named {parameter.name!r}")
            seen.add(parameter.name)

    def forward(self, x: Any) -> tuple[Array, list[Any]]:
        saved: list[Any] = []
        for stage in self.stages:
            x, kept = stage.forward(x)
            saved.append(kept)
        return x, saved

    def backward(self, saved: list[Any], dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        gradient: Array | None = dy
        for stage in reversed(self.stages):
            if gradient is None:
                raise UsageError("stages: only the first stage may have an input without gradient")
            gradient = stage.backward(saved.pop(), gradient, on_gradient)
        return gradient

    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for stage in self.stages for parameter in stage.parameters())
