"""Token embedding with learned positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Stage, check_gradient, check_positive, report

Tokens = NDArray[np.integer[Any]]


class Embedding(Stage[Tokens]):
    """``y[b, t] = tokens[x[b, t]] + positions[t]`` for token numbers ``x`` of shape (batch, length).

    ``length`` may be anything up to ``max_length``.  The input has no gradient: ``backward`` returns None.
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
        self._check(x)
        y = self.tokens.value[x]
        y += self.positions.value[: x.shape[1]]
        return y, x

    def backward(self, saved: Tokens, dy: Array, on_gradient: OnGradient | None = None) -> None:
        check_gradient(self.name, dy, (*saved.shape, self.features))
        self.positions.grad[: saved.shape[1]] += dy.sum(axis=0)
        self._add_rows(saved.reshape(-1), dy.reshape(-1, self.features))
        report((self.positions, self.tokens), on_gradient)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.tokens, self.positions

    def _add_rows(self, tokens: Tokens, rows: Array) -> None:
        """Add ``rows[i]`` to the gradient of ``tokens[i]``: sorted by token first, because ``np.add.at`` is slow."""
        order = np.argsort(tokens, kind="stable")
        present, starts = np.unique(tokens[order], return_index=True)
        self.tokens.grad[present] += np.add.reduceat(rows[order], starts, axis=0)

    def _check(self, x: Tokens) -> None:
        if not np.issubdtype(x.dtype, np.integer):
            raise UsageError(f"{self.name}: expected token numbers of an integer dtype, got {x.dtype}")
        if x.ndim != 2 or not 1 <= x.shape[1] <= self.max_length or x.shape[0] < 1:
            raise UsageError(f"{self.name}: expected shape (batch, 1..{self.max_length}), got {x.shape}")
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= self.vocabulary:
            raise UsageError(f"{self.name}: expected tokens 0..{self.vocabulary - 1}, got {low}..{high}")
