"""Causal multi-head self-attention (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import check_gradient, check_positive
from asyncpar.nn.weightless import Weightless

HeadsSaved = tuple[Array, Array]
"""The projected input, of shape (batch, length, 3 features), and the weights, (batch, heads, length, length)."""


class CausalSelfAttention(Sequential):
    """Each position takes a weighted mean over itself and earlier positions, ``heads`` times side by side.

    Queries, keys and values have no bias: a key bias shifts all scores of a row alike, so softmax cancels it, its true
    gradient is zero, and an adaptive optimizer would feed on rounding noise.

    ``gain`` and ``output_gain`` scale the first values of the first and the last weights.
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

    The input is [queries | keys | values], each by heads, of shape (batch, length, 3 heads width); the output has
    shape (batch, length, heads width).  Heads are independent, so ranks may compute some each.
    """

    def __init__(self, name: str, heads: int, width: int) -> None:
        self.name = name
        self.heads = heads
        self.width = width
        self._scale = 1.0 / math.sqrt(width)

    def forward(self, x: Array) -> tuple[Array, HeadsSaved]:
        check_sequences(self.name, x, 3 * self.heads * self.width)
        query, key, value = self._split(x)
        weights = self._softmax(query @ key.swapaxes(-1, -2))
        mixed = np.empty((*x.shape[:2], self.heads * self.width), x.dtype)
        np.matmul(weights, value, out=self._by_head(mixed))
        return mixed, (x, weights)

    def input_gradient(self, saved: HeadsSaved, dy: Array) -> Array:
        projected, weights = saved
        check_gradient(self.name, dy, (*projected.shape[:2], self.heads * self.width))
        dmixed = self._by_head(dy)
        query, key, value = self._split(projected)
        dprojected = np.empty_like(projected)
        dquery, dkey, dvalue = self._split(dprojected)
        np.matmul(weights.swapaxes(-1, -2), dmixed, out=dvalue)
        dscores: Array = dmixed @ value.swapaxes(-1, -2)
        along = np.einsum("...i,...i->...", dscores, weights)
        dscores -= along[..., np.newaxis]
        dscores *= weights
        dscores *= self._scale
        np.matmul(dscores, key, out=dquery)
        np.matmul(dscores.swapaxes(-1, -2), query, out=dkey)
        return dprojected

    def _split(self, projected: Array) -> tuple[Array, Array, Array]:
        """Return views of queries, keys and values, each (batch, heads, length, width)."""
        batch, length, _ = projected.shape
        parts = projected.reshape(batch, length, 3, self.heads, self.width).transpose(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def _by_head(self, x: Array) -> Array:
        """Return a view of shape (batch, heads, length, width)."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.heads, self.width).transpose(0, 2, 1, 3)

    def _softmax(self, scores: Array) -> Array:
        """Turn scores into weights, in place: scale, hide later positions, normalize each row."""
        length = scores.shape[-1]
        scores *= self._scale
        scores += np.triu(np.full((length, length), -np.inf, scores.dtype), k=1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores


def check_heads(name: str, features: int, heads: int) -> None:
    """Raise ``UsageError`` unless ``heads`` divide ``features``."""
    check_positive(name, features=features, heads=heads)
    if features % heads:
        raise UsageError(f"{name}: expected heads that divide {features} features, got {heads}")


def check_sequences(name: str, x: Array, features: int) -> None:
    """Raise ``UsageError`` unless ``x`` has shape (batch, length, features)."""
    if x.ndim != 3 or x.shape[-1] != features:
        raise UsageError(f"{name}: expected shape (batch, length, {features}), got {x.shape}")
