"""Token embedding with learned positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage, add_weight_gradients, check_gradient, check_positive, report

Tokens = NDArray[np.integer[Any]]


class Embedding(Stage[Tokens]):
    """``y[b, t] = tokens[x[b, t]] + positions[t]`` for token numbers ``x`` of shape (batch, length).

    ``length`` may be anything up to ``max_length``.  The input has no gradient: ``backward`` returns None.

    ``std`` is the standard deviation of the initial values.
    """

    def __init__(
        self, name: str, vocabulary: int, features: int, *, max_length: int, initializer: Initializer, std: float = 0.1
    ) -> None:
        check_positive(name, vocabulary=vocabulary, features=features, max_length=max_length)
        self.name = name
        self.vocabulary = vocabulary
        self.features = features
        self.max_length = max_length
        self.tokens = initializer.normal(f"{name}/tokens", (vocabulary, features), std=std)
        self.positions = initializer.normal(f"{name}/positions", (max_length, features), std=std)

    def forward(self, x: Tokens) -> tuple[Array, Tokens]:
        check_tokens(self.name, x, vocabulary=self.vocabulary, max_length=self.max_length)
        table = self.tokens.value
        y = np.take(table, x, axis=0, out=self.allocate((*x.shape, self.features), table.dtype), mode="clip")
        y += self.positions.value[: x.shape[1]]
        return y, x

    def backward(
        self, saved: Tokens, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> None:
        check_gradient(self.name, dy, (*saved.shape, self.features))
        add_weight_gradients(lambda notify: self._add_gradients(saved, dy, notify), on_gradient, deferred)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.tokens, self.positions

    def _add_gradients(self, x: Tokens, dy: Array, on_gradient: OnGradient | None) -> None:
        if self.positions.requires_grad:
            self.positions.accumulate(dy.sum(axis=0), slice(x.shape[1]))
        add_rows(self.tokens, x.reshape(-1), dy.reshape(-1, self.features))
        report((self.positions, self.tokens), on_gradient)


def add_rows(table: Parameter, at: Tokens, rows: Array) -> None:
    """Add ``rows[i]`` to the gradient of row ``at[i]``; sorts first, because ``np.add.at`` is slow."""
    if not table.requires_grad:
        return
    order = np.argsort(at, kind="stable")
    present, starts = np.unique(at[order], return_index=True)
    table.accumulate(np.add.reduceat(rows[order], starts, axis=0), present)


def check_tokens(name: str, x: Tokens, *, vocabulary: int, max_length: int) -> None:
    """Raise ``UsageError`` unless ``x`` are tokens of shape (batch, 1..max_length)."""
    if not np.issubdtype(x.dtype, np.integer):
        raise UsageError(f"{name}: expected token numbers of an integer dtype, got {x.dtype}")
    if x.ndim != 2 or not 1 <= x.shape[1] <= max_length or x.shape[0] < 1:
        raise UsageError(f"{name}: expected shape (batch, 1..{max_length}), got {x.shape}")
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(f"{name}: expected tokens 0..{vocabulary - 1}, got {low}..{high}")
