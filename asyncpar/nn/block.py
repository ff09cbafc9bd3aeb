"""The residual block of a transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.core.array_pool import ArrayPool
from asyncpar.nn.attention import CausalSelfAttention
from asyncpar.nn.mlp import Mlp
from asyncpar.nn.normalization import LayerNorm
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Deferred, Stage

MakeDropout = Callable[[str], Stage[Any]]
"""Makes the dropout layer of a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Options of a block beyond its size.

    ``hidden`` is the width of the perceptron, by default four times the features.  ``gain`` scales the initial values
    of weights, ``output_gain`` those of weights whose result is added to the residual stream.

    ``make_dropout`` makes the dropout layer of a name (None: no dropout).
    """

    hidden: int | None = None
    gain: float = 1.0
    output_gain: float = 1.0
    make_dropout: MakeDropout | None = None

    def hidden_of(self, features: int) -> int:
        """Return the width of the perceptron."""
        return 4 * features if self.hidden is None else self.hidden

    def dropout(self, name: str) -> tuple[Stage[Any], ...]:
        """Return a tuple of the dropout layer called ``name``; an empty one without dropout."""
        return () if self.make_dropout is None else (self.make_dropout(name),)


class Block(Sequential):
    """``h = x + attention(norm(x)); y = h + mlp(norm(h))``: normalization first (Xiong et al. 2020).

    Dropout is applied to each term before it is added.

    ``options`` are the width of the perceptron, the scale of initial values, and dropout.
    """

    def __init__(
        self,
        name: str,
        features: int,
        heads: int,
        *,
        initializer: Initializer,
        options: BlockOptions | None = None,
    ) -> None:
        options = BlockOptions() if options is None else options
        gains = {"gain": options.gain, "output_gain": options.output_gain}
        self.first_norm = LayerNorm(f"{name}/first_norm", features, initializer=initializer)
        self.attention = CausalSelfAttention(f"{name}/attention", features, heads, initializer=initializer, **gains)
        self.second_norm = LayerNorm(f"{name}/second_norm", features, initializer=initializer)
        hidden = options.hidden_of(features)
        self.mlp = Mlp(f"{name}/mlp", features, hidden, initializer=initializer, **gains)
        first = Sequential([self.first_norm, self.attention, *options.dropout(f"{name}/first_dropout")])
        second = Sequential([self.second_norm, self.mlp, *options.dropout(f"{name}/second_dropout")])
        super().__init__([Residual(first), Residual(second)])


class Residual(Stage[Any]):
    """``y = x + inner(x)``.  ``inner`` must return new arrays, which it does not save: they are added to in place."""

    def __init__(self, inner: Stage[Any]) -> None:
        self._inner = inner

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, saved = self._inner.forward(x)
        y += x
        return y, saved

    def backward(
        self, saved: Any, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        dx = self._inner.backward(saved, dy, on_gradient, deferred)
        assert dx is not None
        dx += dy
        return dx

    def use_memory(self, memory: ArrayPool) -> None:
        super().use_memory(memory)
        self._inner.use_memory(memory)

    def parameters(self) -> tuple[Parameter, ...]:
        return self._inner.parameters()

    def generators(self) -> tuple[np.random.Generator, ...]:
        return self._inner.generators()
