"""Gradients of micro-steps, added up by name.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[np.floating[Any]]


class GradientSyncBuffer:
    """Sums of gradients, each with the number of gradients in it, until they are averaged."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._counts: dict[str, int] = {}
        self._is_averaged = False

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __getitem__(self, name: str) -> Array:
        """Return the array itself: the sum, or the mean after ``average_gradients``."""
        if name not in self._sums:
            raise UsageError(f"name: there is no gradient of {name!r} in the buffer")
        return self._sums[name]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many gradients have been added, by name."""
        return MappingProxyType(self._counts)

    @property
    def nbytes(self) -> int:
        """What the sums take."""
        return sum(gradient.nbytes for gradient in self._sums.values())

    def add_gradient(self, name: str, gradient: Array, *, owns: bool = False) -> None:
        """Add ``gradient``: the part of one micro-step, not a sum over micro-steps so far.

        With ``owns`` the array is the buffer's from now on, and may become the sum; else it is copied.  Raises
        ``UsageError`` for another shape or dtype than before, and between averaging and clearing.
        """
        self._check_open("add_gradient")
        if not np.issubdtype(gradient.dtype, np.floating):
            raise UsageError(f"gradient of {name}: expected a floating dtype, got {gradient.dtype}")
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = gradient if owns and gradient.flags.c_contiguous else np.array(gradient, order="C")
        elif (known.shape, known.dtype) != (gradient.shape, gradient.dtype):
            raise UsageError(
                f"gradient of {name}: expected {known.dtype}{list(known.shape)} as before, "
                f"got {gradient.dtype}{list(gradient.shape)}"
            )
        else:
            known += gradient
        self._counts[name] = self._counts.get(name, 0) + 1

    def add_nothing(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Make sure that there is a sum of ``name``, which counts no gradient."""
        self._check_open("add_nothing")
        if name not in self._sums:
            self._sums[name] = np.zeros(shape, dtype)
            self._counts[name] = 0

    def pop(self, name: str) -> Array:
        """Return the array of ``name`` and forget it."""
        gradient = self[name]
        del self._sums[name], self._counts[name]
        return gradient

    def average_gradients(self, micro_steps: int | None = None) -> Mapping[str, Array]:
        """Make each sum the mean over ``micro_steps``, by default over as many gradients as it has; return the means.

        A parameter that got a gradient in fewer than ``micro_steps`` had a zero in the others.  Divides once, however
        often it is called until ``clear``.  Raises ``UsageError`` where a name counts more than ``micro_steps``.
        """
        if not self._is_averaged:
            self._divide(micro_steps)
            self._is_averaged = True
        return MappingProxyType(self._sums)

    def multiply(self, factor: float) -> None:
        """Multiply all sums, or means, by ``factor``."""
        for gradient in self._sums.values():
            gradient *= factor

    def clear(self) -> None:
        """Forget all sums, and free their memory."""
        self._sums, self._counts, self._is_averaged = {}, {}, False

    def _divide(self, micro_steps: int | None) -> None:
        if micro_steps is not None and micro_steps < 1:
            raise UsageError(f"micro_steps: expected 1 or more, got {micro_steps}")
        for name, count in self._counts.items():
            if micro_steps is not None and count > micro_steps:
                raise UsageError(f"micro_steps: expected at least {count}, the gradients of {name}, got {micro_steps}")
        for name, gradient in self._sums.items():
            gradient /= max(1, self._counts[name]) if micro_steps is None else micro_steps

    def _check_open(self, what: str) -> None:
        if self._is_averaged:
            raise UsageError(f"{what}: the gradients have been averaged; clear the buffer first")
