"""Dropout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.nn.stage import check_gradient
from asyncpar.nn.weightless import Weightless


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutSaved:
    """The mask of the values that were kept; None if nothing is dropped."""

    shape: tuple[int, ...]
    mask: NDArray[np.bool_] | None


class Dropout(Weightless[DropoutSaved]):
    """Set each value to zero with probability ``rate``, and scale the others by ``1 / (1 - rate)`` (Srivastava 2014).

    It draws from its own generator, which depends on ``name`` and ``seed`` alone: the n-th forward pass of a layer
    drops the same places on any rank, in any precision, whatever other layers draw.  Ranks that must draw alike (tensor
    parallelism over whole activations) pass the same seed, replicas that must not pass different ones.  Without
    ``is_training`` it changes and draws nothing.
    """

    def __init__(self, name: str, rate: float, *, seed: int) -> None:
        if not 0.0 <= rate < 1.0:
            raise UsageError(f"{name}: expected a rate of 0 or more and less than 1, got {rate!r}")
        if seed < 0:
            raise UsageError(f"{name}: expected a seed of 0 or more, got {seed!r}")
        self.name = name
        self.rate = rate
        self.is_training = True
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        self._generator = np.random.default_rng([seed, number])

    def forward(self, x: Array) -> tuple[Array, DropoutSaved]:
        if not np.issubdtype(x.dtype, np.floating):
            raise UsageError(f"{self.name}: expected an input of a floating dtype, got {x.dtype}")
        if not self.is_training or self.rate == 0.0:
            return x.copy(), DropoutSaved(shape=x.shape, mask=None)
        mask = self._generator.random(x.shape, np.float32) >= np.float32(self.rate)
        return self._kept(x, mask), DropoutSaved(shape=x.shape, mask=mask)

    def input_gradient(self, saved: DropoutSaved, dy: Array) -> Array:
        check_gradient(self.name, dy, saved.shape)
        return dy.copy() if saved.mask is None else self._kept(dy, saved.mask)

    def generators(self) -> tuple[np.random.Generator, ...]:
        return (self._generator,)

    def _kept(self, x: Array, mask: NDArray[np.bool_]) -> Array:
        scale: Any = x.dtype.type(1.0 / (1.0 - self.rate))
        y: Array = np.multiply(x, scale, out=self.allocate(x.shape, x.dtype))
        y *= mask
        return y
