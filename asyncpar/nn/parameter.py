"""Parameters: named arrays with gradients, and where their first values come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[np.floating[Any]]

OnGradient: TypeAlias = Callable[[str], None]
"""Called with a parameter's name as soon as its gradient is final, from the thread that runs the backward pass."""


class Parameter:
    """A trainable array and the gradient that backward passes accumulate into.

    ``value`` and ``grad`` are C-contiguous, of one shape and floating dtype, and stay the same arrays for life: change
    them in place.
    """

    __slots__ = ("grad", "name", "value")

    def __init__(self, name: str, value: Array) -> None:
        if not np.issubdtype(value.dtype, np.floating):
            raise UsageError(f"parameter {name}: expected a floating dtype, got {value.dtype}")
        self.name = name
        self.value: Array = np.asarray(value, order="C")
        self.grad: Array = np.zeros_like(self.value)

    def zero_grad(self) -> None:
        """Forget the accumulated gradient."""
        self.grad.fill(0.0)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.value.shape}, dtype={self.value.dtype})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """Draws first values in the order of construction, so that one seed fixes the whole model.

    Values are drawn in float64 and rounded to ``dtype``: models of different precision start at the same point.
    """

    rng: np.random.Generator
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise UsageError(f"dtype: expected float32 or float64, got {self.dtype}")

    @classmethod
    def from_seed(cls, seed: int, dtype: str | np.dtype[Any] = "float32") -> Initializer:
        """Return an initializer whose draws depend on ``seed`` alone."""
        return cls(rng=np.random.default_rng(seed), dtype=np.dtype(dtype))

    def normal(self, name: str, shape: tuple[int, ...], *, std: float) -> Parameter:
        """Return a parameter drawn from a normal distribution around zero."""
        return Parameter(name, self.rng.normal(0.0, std, shape).astype(self.dtype))

    def constant(self, name: str, shape: tuple[int, ...], value: float) -> Parameter:
        """Return a parameter filled with ``value``; draws nothing."""
        return Parameter(name, np.full(shape, value, self.dtype))
