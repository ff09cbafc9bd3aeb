"""Causal multi-head self-attention (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Stage, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSaved:
    """``projected`` is (batch, length, 3 features), ``weights`` (batch, heads, length, length), others as the input."""

    x: Array
    projected: Array
    weights: Array
    mixed: Array


class CausalSelfAttention(Stage[AttentionSaved]):
    """Each position takes a weighted mean over itself and earlier positions, ``heads`` times side by side.

    Queries, keys and values have no bias: a key bias shifts all scores of a row alike, so softmax cancels it, its true
    gradient is zero, and an adaptive optimizer would feed on rounding noise.
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
        check_positive(name, features=features, heads=heads)
        if features % heads:
            raise UsageError(f"{name}: expected heads that divide {features} features, got {heads}")
        self.name = name
        self.features = features
        self.heads = heads
        self._scale = 1.0 / math.sqrt(features // heads)
        self.project = Linear(
            f"{name}/project", features, 3 * features, initializer=initializer, gain=gain, has_bias=False
        )
        self.output = Linear(f"{name}/output", features, features, initializer=initializer, gain=output_gain)

    def forward(self, x: Array) -> tuple[Array, AttentionSaved]:
        if x.ndim != 3:
            raise UsageError(f"{self.name}: expected shape (batch, length, {self.features}), got {x.shape}")
        projected, _ = self.project.forward(x)
        query, key, value = self._split(projected)
        weights = self._softmax(query @ key.swapaxes(-1, -2))
        mixed = np.empty(x.shape, projected.dtype)
        np.matmul(weights, value, out=self._by_head(mixed))
        y, _ = self.output.forward(mixed)
        return y, AttentionSaved(x=x, projected=projected, weights=weights, mixed=mixed)

    def backward(self, saved: AttentionSaved, dy: Array, on_gradient: OnGradient | None = None) -> Array:
        dmixed = self._by_head(self.output.backward(saved.mixed, dy, on_gradient))
        query, key, value = self._split(saved.projected)
        dprojected = np.empty_like(saved.projected)
        dquery, dkey, dvalue = self._split(dprojected)
        np.matmul(saved.weights.swapaxes(-1, -2), dmixed, out=dvalue)
        dscores: Array = dmixed @ value.swapaxes(-1, -2)
        along = np.einsum("...i,...i->...", dscores, saved.weights)
        dscores -= along[..., np.newaxis]
        dscores *= saved.weights
        dscores *= self._scale
        np.matmul(dscores, key, out=dquery)
        np.matmul(dscores.swapaxes(-1, -2), query, out=dkey)
        return self.project.backward(saved.x, dprojected, on_gradient)

    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.project.parameters(), *self.output.parameters())

    def _split(self, projected: Array) -> tuple[Array, Array, Array]:
        """Return views of queries, keys and values, each (batch, heads, length, features / heads)."""
        batch, length, _ = projected.shape
        parts = projected.reshape(batch, length, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def _by_head(self, x: Array) -> Array:
        """Return a view of shape (batch, heads, length, features / heads)."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.heads, -1).transpose(0, 2, 1, 3)

    def _softmax(self, scores: Array) -> Array:
        """Turn scores into weights, in place: scale, hide later positions, normalize each row."""
        length = scores.shape[-1]
        scores *= self._scale
        scores += np.triu(np.full((length, length), -np.inf, scores.dtype), k=1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores
