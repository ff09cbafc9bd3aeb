"""Layers whose parameters are there only while they compute: stage 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.zero.residence import BACKWARD, FORWARD, Residence


class ShardedStage(Stage[Any]):
    """``inner``, whose parameters are gathered before each pass and released after it.

    Runs in a compute thread, which waits here for what is not there yet.  Weight gradients that are deferred must not
    need values, as those of all layers of ``asyncpar.nn`` do not.  To recompute activations, shard the layer that
    recomputes, not the one inside it, lest values are gathered once more.
    """

    def __init__(self, inner: Stage[Any], index: int) -> None:
        self.inner = inner
        self._index = index
        self._residence: Residence | None = None

    def settle(self, residence: Residence) -> None:
        """Use ``residence`` from now on; before, parameters are whole."""
        self._residence = residence

    def forward(self, x: Any) -> tuple[Array, Any]:
        if self._residence is None:
            return self.inner.forward(x)
        with self._residence.using(self._index, FORWARD):
            return self.inner.forward(x)

    def forward_again(self, x: Any) -> tuple[Array, Any]:
        if self._residence is None:
            return self.inner.forward_again(x)
        with self._residence.using(self._index, BACKWARD):
            return self.inner.forward_again(x)

    def backward(
        self, saved: Any, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        if self._residence is None:
            return self.inner.backward(saved, dy, on_gradient, deferred)
        with self._residence.using(self._index, BACKWARD):
            return self.inner.backward(saved, dy, on_gradient, deferred)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.inner.parameters()

    def generators(self) -> tuple[np.random.Generator, ...]:
        return self.inner.generators()
