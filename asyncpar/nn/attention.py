"""Causal multi-head self-attention (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.slices import slices
from asyncpar.nn.stage import check_gradient, check_positive
from asyncpar.nn.weightless import Weightless

HeadsSaved = tuple[Array, Array]
"""The projected input, of shape (batch, length, 3 features), and the weights, (batch, heads, keys, queries)."""


class CausalSelfAttention(Sequential):
    """Each position takes a weighted mean over itself and earlier positions, in ``heads`` parallel heads.

    Queries, keys and values have no bias: a key bias shifts all scores of a row equally, so softmax cancels it, its
    true gradient is zero, and an adaptive optimizer would amplify rounding noise.

    ``gain`` and ``output_gain`` scale the initial values of the first and the last weights.
    """

    def __init__(
        self,
        name: str,
        features: int,
        heads: int,
        *,
        initializer: Initializer,
        gain: float = 1.0,
        output_gain: float = 1.0,
    ) -> None:
        check_heads(name, features, heads)
        self.name = name
        self.features = features
        self.project = Linear(
            f"{name}/project", features, 3 * features, initializer=initializer, gain=gain, has_bias=False
        )
        self.output = Linear(f"{name}/output", features, features, initializer=initializer, gain=output_gain)
        super().__init__([self.project, AttentionHeads(name, heads, features // heads), self.output])

    def forward(self, x: Array) -> tuple[Array, list[Any]]:
        check_sequences(self.name, x, self.features)
        return super().forward(x)


class AttentionHeads(Weightless[HeadsSaved]):
    """Attention between its two projections: ``heads`` weighted means, each of ``width`` features.

    The input is [queries | keys | values], each by heads, of shape (batch, length, 3 heads width); the output has shape
    (batch, length, heads width).  Heads are independent, so each rank may compute some of them.

    The weights of a query are a column: numpy finds maxima and sums across rows faster than along them.
    """

    def __init__(self, name: str, heads: int, width: int) -> None:
        self.name = name
        self.heads = heads
        self.width = width
        self._scale = 1.0 / math.sqrt(width)

    def forward(self, x: Array) -> tuple[Array, HeadsSaved]:
        check_sequences(self.name, x, 3 * self.heads * self.width)
        batch, length, _ = x.shape
        weights = self.allocate((batch, self.heads, length, length), x.dtype)
        mixed = self.allocate((batch, length, self.heads * self.width), x.dtype)
        later = np.tril(np.full((length, length), -np.inf, x.dtype), k=-1)
        for part in self._parts(x):
            query, key, value = self._split(x[part])
            scores = np.matmul(key, (query * self._scale).swapaxes(-1, -2), out=weights[part])
            scores += later
            normalize(scores)
            np.matmul(scores.swapaxes(-1, -2), value, out=self._by_head(mixed[part]))
        return mixed, (x, weights)

    def input_gradient(self, saved: HeadsSaved, dy: Array) -> Array:
        projected, weights = saved
        check_gradient(self.name, dy, (*projected.shape[:2], self.heads * self.width))
        dprojected = self.allocate(projected.shape, projected.dtype)
        scratch = self.allocate(weights[next(self._parts(projected), slice(0))].shape, weights.dtype)
        for part in self._parts(projected):
            query, key, value = self._split(projected[part])
            dquery, dkey, dvalue = self._split(dprojected[part])
            own, dmixed = weights[part], self._by_head(dy[part])
            np.matmul(own, dmixed, out=dvalue)
            dscores = np.matmul(value, dmixed.swapaxes(-1, -2), out=scratch[: len(own)])
            dscores -= np.einsum("...ij,...ij->...j", dscores, own)[..., np.newaxis, :]
            dscores *= own
            dscores *= self._scale
            np.matmul(dscores.swapaxes(-1, -2), key, out=dquery)
            np.matmul(dscores, query, out=dkey)
        return dprojected

    def _parts(self, x: Array) -> Iterator[slice]:
        """Yield slices of the batch, each of sequences whose scores stay in the cache."""
        return slices(len(x), self.heads * x.shape[1] ** 2)

    def _split(self, projected: Array) -> tuple[Array, Array, Array]:
        """Return views of queries, keys and values, each (batch, heads, length, width)."""
        batch, length, _ = projected.shape
        parts = projected.reshape(batch, length, 3, self.heads, self.width).transpose(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def _by_head(self, x: Array) -> Array:
        """Return a view of shape (batch, heads, length, width)."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.heads, self.width).transpose(0, 2, 1, 3)


def normalize(scores: Array) -> None:
    """Replace ``scores`` by their softmax along the dimension before the last."""
    scores -= scores.max(axis=-2, keepdims=True)
    np.exp(scores, out=scores)
    total = np.ones(scores.shape[-2], scores.dtype) @ scores
    scores *= (1.0 / total)[..., np.newaxis, :]


def check_heads(name: str, features: int, heads: int) -> None:
    """Raise ``UsageError`` unless ``heads`` divide ``features``."""
    check_positive(name, features=features, heads=heads)
    if features % heads:
        raise UsageError(f"{name}: expected heads that divide {features} features, got {heads}")


def check_sequences(name: str, x: Array, features: int) -> None:
    """Raise ``UsageError`` unless ``x`` has shape (batch, length, features)."""
    if x.ndim != 3 or x.shape[-1] != features:
        raise UsageError(f"{name}: expected shape (batch, length, {features}), got {x.shape}")
