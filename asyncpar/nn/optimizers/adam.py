"""Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.optimizers.rule import Rule, check_fraction
from asyncpar.nn.parameter import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments(Rule):
    """The base of Adam and AdamW.  ``epsilon`` is added after bias correction."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        check_fraction("beta1", self.beta1)
        check_fraction("beta2", self.beta2)
        if not self.epsilon > 0.0:
            raise UsageError(f"epsilon: expected a positive number, got {self.epsilon}")

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("first", "second")

    def _move(
        self,
        value: Array,
        gradient: Array,
        states: Mapping[str, Array],
        *,
        step: int,
        learning_rate: float,
        keep: float,
    ) -> None:
        """Multiply ``value`` by ``keep`` and subtract the corrected first moment over the root of the second."""
        first, second = states["first"], states["second"]
        scratch: Array = gradient * (1.0 - self.beta1)
        first *= self.beta1
        first += scratch
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1.0 - self.beta2
        second *= self.beta2
        second += scratch
        np.multiply(second, 1.0 / (1.0 - self.beta2**step), out=scratch)
        np.sqrt(scratch, out=scratch)
        scratch += self.epsilon
        np.divide(first, scratch, out=scratch)
        scratch *= learning_rate / (1.0 - self.beta1**step)
        if keep != 1.0:
            value *= keep
        value -= scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Moments):
    """Adam; ``weight_decay`` times the value is added to the gradient, and so enters the moments.

    ``beta1`` and ``beta2`` are the decay rates of the first and the second moment.
    """

    def update(
        self,
        value: Array,
        gradient: Array,
        states: Mapping[str, Array],
        *,
        step: int,
        learning_rate: float,
        decays: bool,
    ) -> None:
        if self.weight_decay and decays:
            gradient = gradient + self.weight_decay * value
        self._move(value, gradient, states, step=step, learning_rate=learning_rate, keep=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Moments):
    """Adam with decoupled ``weight_decay``: values shrink by that times the learning rate in each step.

    ``beta1`` and ``beta2`` are the decay rates of the first and the second moment.
    """

    def update(
        self,
        value: Array,
        gradient: Array,
        states: Mapping[str, Array],
        *,
        step: int,
        learning_rate: float,
        decays: bool,
    ) -> None:
        keep = 1.0 - learning_rate * self.weight_decay if decays else 1.0
        self._move(value, gradient, states, step=step, learning_rate=learning_rate, keep=keep)
