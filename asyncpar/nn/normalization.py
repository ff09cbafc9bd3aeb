"""Layer normalization (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

import numpy as np

from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import (
    Deferred,
    Stage,
    add_weight_gradients,
    check_features,
    check_gradient,
    check_positive,
    report,
)

LayerNormSaved = tuple[Array, Array]
"""The normalized input, and one over its standard deviation with a last dimension of 1."""


class LayerNorm(Stage[LayerNormSaved]):
    """Normalize the last dimension to mean 0 and variance 1, then scale and shift each feature.

    The variance is the biased one, with ``epsilon`` added to it.

    ``placement`` determines on which ranks its parameters are the same.
    """

    def __init__(
        self,
        name: str,
        features: int,
        *,
        initializer: Initializer,
        epsilon: float = 1e-5,
        placement: Placement = UNPLACED,
    ) -> None:
        check_positive(name, features=features)
        self.name = name
        self.features = features
        self.epsilon = epsilon
        self.scale = initializer.constant(f"{name}/scale", (features,), 1.0, placement=placement)
        self.shift = initializer.constant(f"{name}/shift", (features,), 0.0, placement=placement)

    def forward(self, x: Array) -> tuple[Array, LayerNormSaved]:
        check_features(self.name, x, self.features)
        normalized = np.subtract(x, x.mean(axis=-1, keepdims=True), out=self.allocate(x.shape, x.dtype))
        variance = self._mean_of_product(normalized, normalized)
        variance += self.epsilon
        inverse: Array = 1.0 / np.sqrt(variance)
        normalized *= inverse
        y = np.multiply(normalized, self.scale.value, out=self.allocate(x.shape, x.dtype))
        y += self.shift.value
        return y, (normalized, inverse)

    def backward(
        self, saved: LayerNormSaved, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        normalized, inverse = saved
        check_gradient(self.name, dy, normalized.shape)
        add_weight_gradients(lambda notify: self._add_gradients(normalized, dy, notify), on_gradient, deferred)
        dx = np.multiply(dy, self.scale.value, out=self.allocate(dy.shape, dy.dtype))
        along = self._mean_of_product(dx, normalized)
        dx -= dx.mean(axis=-1, keepdims=True)
        dx -= np.multiply(normalized, along, out=self.allocate(dy.shape, dy.dtype))
        dx *= inverse
        return dx

    def parameters(self) -> tuple[Parameter, ...]:
        return self.scale, self.shift

    def _add_gradients(self, normalized: Array, dy: Array, on_gradient: OnGradient | None) -> None:
        rows = dy.reshape(-1, self.features)
        if self.shift.requires_grad:
            self.shift.accumulate(rows.sum(axis=0))
        if self.scale.requires_grad:
            self.scale.accumulate(np.einsum("ij,ij->j", rows, normalized.reshape(-1, self.features)))
        report((self.shift, self.scale), on_gradient)

    def _mean_of_product(self, a: Array, b: Array) -> Array:
        mean: Array = np.einsum("...i,...i->...", a, b)[..., np.newaxis]
        mean *= 1.0 / self.features
        return mean
