"""Stages without parameters."""

from __future__ import annotations

from abc import abstractmethod

from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Saved, Stage


class Weightless(Stage[Saved]):
    """A function without parameters, whose input has a gradient."""

    @abstractmethod
    def input_gradient(self, saved: Saved, dy: Array) -> Array:
        """Return the gradient of the input."""

    def backward(
        self,
        saved: Saved,
        dy: Array,
        on_gradient: OnGradient | None = None,  # noqa: ARG002
        deferred: Deferred | None = None,  # noqa: ARG002
    ) -> Array:
        return self.input_gradient(saved, dy)

    def parameters(self) -> tuple[Parameter, ...]:
        return ()
