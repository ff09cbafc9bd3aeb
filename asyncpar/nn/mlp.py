"""The two-layer perceptron of a transformer block."""

from __future__ import annotations

import math

import numpy as np

from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.slices import slices
from asyncpar.nn.stage import check_gradient
from asyncpar.nn.weightless import Weightless

_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


class Mlp(Sequential):
    """Linear, GELU, linear.

    ``gain`` and ``output_gain`` scale the initial values of the first and the last weights.
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


class Gelu(Weightless[Array]):
    """GELU in its tanh form (Hendrycks and Gimpel 2016), elementwise.  Saves its derivative."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, x: Array) -> tuple[Array, Array]:
        y, slope = self.allocate(x.shape, x.dtype), self.allocate(x.shape, x.dtype)
        flat = x.reshape(-1)
        for part in slices(flat.size, 1):
            gelu(flat[part], y.reshape(-1)[part], slope.reshape(-1)[part])
        return y, slope

    def input_gradient(self, saved: Array, dy: Array) -> Array:
        check_gradient(self.name, dy, saved.shape)
        dx: Array = np.multiply(saved, dy, out=self.allocate(saved.shape, saved.dtype))
        return dx


def gelu(x: Array, y: Array, slope: Array) -> None:
    """Set ``y`` to ``x h``, with ``h = (1 + tanh(u)) / 2`` and ``u = sqrt(2/pi) (x + 0.044715 x^3)``.

    ``slope`` is set to the derivative, ``h + 2 x h (1 - h) u'``.
    """
    np.multiply(x, x, out=slope)
    share = slope * (_ROOT * _CUBIC)
    share += _ROOT
    share *= x
    np.tanh(share, out=share)
    share *= 0.5
    share += 0.5
    np.multiply(x, share, out=y)
    slope *= 6.0 * _ROOT * _CUBIC
    slope += 2.0 * _ROOT
    slope *= y
    slope -= slope * share
    slope += share
