"""Token embedding with some of the rows on each rank (Shoeybi et al. 2019)."""

from __future__ import annotations

import numpy as np

from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.nn.embedding import Tokens, add_rows, check_tokens
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage, add_weight_gradients, check_gradient, check_positive, report
from asyncpar.nn.tensor.region import TensorRegion


class VocabParallelEmbedding(Stage[Tokens]):
    """``Embedding`` with the token table cut by ``split_bounds``; positions are on every rank.

    Every rank takes the same tokens, looks up those it has, and uses zero for others; the sum over ranks is the
    embedding.  Output and its gradient have the region's outside layout of activations.

    ``std`` is the standard deviation of the initial values; ``table_placement`` determines on which ranks the table is
    the same.
    """

    def __init__(
        self,
        name: str,
        vocabulary: int,
        features: int,
        *,
        max_length: int,
        region: TensorRegion,
        initializer: Initializer,
        std: float = 0.1,
        table_placement: Placement = UNPLACED,
    ) -> None:
        check_positive(name, vocabulary=vocabulary, features=features, max_length=max_length)
        self.name = name
        self.vocabulary = vocabulary
        self.features = features
        self.max_length = max_length
        self._region = region
        self._start, self._stop = region.cut(name, "vocabulary", vocabulary)
        self.tokens = initializer.normal(
            f"{name}/tokens",
            (vocabulary, features),
            std=std,
            part=TensorSlice.along((vocabulary, features), 0, self._start, self._stop),
            placement=table_placement,
        )
        self.positions = initializer.normal(
            f"{name}/positions", (max_length, features), std=std, placement=region.placement
        )

    def forward(self, x: Tokens) -> tuple[Array, Tokens]:
        check_tokens(self.name, x, vocabulary=self.vocabulary, max_length=self.max_length)
        own = (x >= self._start) & (x < self._stop)
        y: Array = self.tokens.value[np.where(own, x - self._start, 0)]
        y[~own] = 0.0
        y = self._region.leave(y)
        y += self.positions.value[self._positions_of(x)]
        return y, x

    def backward(
        self, saved: Tokens, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> None:
        start, stop = self._region.sequence_bounds(saved.shape[1])
        check_gradient(self.name, dy, (saved.shape[0], stop - start, self.features))
        add_weight_gradients(lambda notify: self._add_gradients(saved, dy, notify), on_gradient, deferred)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.tokens, self.positions

    def _add_gradients(self, x: Tokens, dy: Array, on_gradient: OnGradient | None) -> None:
        if self.positions.requires_grad:
            self.positions.accumulate(dy.sum(axis=0), self._positions_of(x))
        whole = self._region.leave_gradient(dy)
        own = (x >= self._start) & (x < self._stop)
        if own.any():
            add_rows(self.tokens, x[own] - self._start, whole[own])
        report((self.positions, self.tokens), on_gradient)

    def _positions_of(self, x: Tokens) -> slice:
        return slice(*self._region.sequence_bounds(x.shape[1]))
