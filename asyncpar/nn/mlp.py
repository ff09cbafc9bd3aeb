"""The two-layer perceptron of a transformer block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Stage

_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSaved:
    """What the backward pass needs: input, values before and after the activation, and the tanh inside it."""

    x: Array
    hidden: Array
    tanh: Array
    active: Array


class Mlp(Stage[MlpSaved]):
    """Linear, GELU, linear.  GELU in its tanh form (Hendrycks and Gimpel 2016)."""

    def __init__(
        self,
        name: str,
        features: int,
        hidden: int,
        *,
        initializer: Initializer,
        gain: float = 1.0,
        output_gain: float = 1.0,
    ) -> None:
        self.name = name
        self.widen = Linear(f"{name}/widen", features, hidden, initializer=initializer, gain=gain)
        self.narrow = Linear(f"{name}/narrow", hidden, features, initializer=initializer, gain=output_gain)

    def forward(self, x: Array) -> tuple[Array, MlpSaved]:
        hidden, _ = self.widen.forward(x)
        active, tanh = gelu(hidden)
        y, _ = self.narrow.forward(active)
        return y, MlpSaved(x=x, hidden=hidden, tanh=tanh, active=active)

    def backward(self, saved: MlpSaved, dy: Array, on_gradient: OnGradient | None = None) -> Array:
        dactive = self.narrow.backward(saved.active, dy, on_gradient)
        return self.widen.backward(saved.x, gelu_backward(saved.hidden, saved.tanh, dactive), on_gradient)

    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.widen.parameters(), *self.narrow.parameters())


def gelu(x: Array) -> tuple[Array, Array]:
    """Return ``x (1 + t) / 2`` and ``t = tanh(sqrt(2/pi) (x + 0.044715 x^3))``."""
    tanh: Array = x * x
    tanh *= _ROOT * _CUBIC
    tanh += _ROOT
    tanh *= x
    np.tanh(tanh, out=tanh)
    y: Array = tanh + 1.0
    y *= x
    y *= 0.5
    return y, tanh


def gelu_backward(x: Array, tanh: Array, dy: Array) -> Array:
    """Return ``dy`` times the derivative ``(1 + t) / 2 + x (1 - t^2) u' / 2``, with ``u`` the argument of tanh."""
    slope: Array = x * x
    slope *= 3.0 * _ROOT * _CUBIC
    slope += _ROOT
    slope *= x
    rest: Array = tanh * tanh
    np.subtract(1.0, rest, out=rest)
    slope *= rest
    slope += tanh
    slope += 1.0
    slope *= 0.5
    slope *= dy
    return slope
