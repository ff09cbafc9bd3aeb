"""The two-layer perceptron of a transformer block."""

from __future__ import annotations

import math

import numpy as np

from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import check_gradient
from asyncpar.nn.weightless import Weightless

_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

GeluSaved = tuple[Array, Array]
"""The input, and the tanh inside."""


class Mlp(Sequential):
    """Linear, GELU, linear.

    ``gain`` and ``output_gain`` scale the first values of the first and the last weights.
    """

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
        super().__init__([self.widen, Gelu(f"{name}/gelu"), self.narrow])


class Gelu(Weightless[GeluSaved]):
    """GELU in its tanh form (Hendrycks and Gimpel 2016), element by element."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, x: Array) -> tuple[Array, GeluSaved]:
        y, tanh = gelu(x)
        return y, (x, tanh)

    def input_gradient(self, saved: GeluSaved, dy: Array) -> Array:
        x, tanh = saved
        check_gradient(self.name, dy, x.shape)
        return gelu_backward(x, tanh, dy)


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
