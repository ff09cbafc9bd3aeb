"""AdamW (Loshchilov and Hutter 2019) over Adam (Kingma and Ba 2015)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn.parameter import Array, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Settings of AdamW.  ``clip_norm`` None leaves gradients as they are.

    ``epsilon`` is added after bias correction.  ``weight_decay`` is decoupled from the gradient, scaled by the learning
    rate, and applies to parameters of two or more dimensions only: biases and normalization are left alone.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise UsageError(f"{name}: expected 0 <= {name} < 1, got {beta}")
        if not self.epsilon > 0.0:
            raise UsageError(f"epsilon: expected a positive number, got {self.epsilon}")
        if self.weight_decay < 0.0:
            raise UsageError(f"weight_decay: expected a number >= 0, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise UsageError(f"clip_norm: expected a positive number or None, got {self.clip_norm}")


class AdamW:
    """Holds the moments of ``parameters`` and moves them against their gradients."""

    def __init__(self, parameters: Sequence[Parameter], config: AdamWConfig) -> None:
        if not parameters:
            raise UsageError("parameters: expected at least one parameter, got none")
        self.config = config
        self.parameters = tuple(parameters)
        self.step_count = 0
        self._first = [np.zeros_like(parameter.value) for parameter in self.parameters]
        self._second = [np.zeros_like(parameter.value) for parameter in self.parameters]

    def step(self, learning_rate: float) -> float:
        """Update all parameters once, in place, and return the global norm of the gradients before clipping.

        Gradients are left as they are.  Raises ``NonFiniteValue``, with nothing changed, when the norm is not finite.
        """
        norm = global_norm(parameter.grad for parameter in self.parameters)
        if not math.isfinite(norm):
            raise NonFiniteValue(f"gradients: expected a finite global norm at step {self.step_count}, got {norm}")
        clip = self.config.clip_norm
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        self.step_count += 1
        for parameter, first, second in zip(self.parameters, self._first, self._second, strict=True):
            self._update(parameter, first, second, factor=factor, learning_rate=learning_rate)
        return norm

    def _update(
        self, parameter: Parameter, first: Array, second: Array, *, factor: float, learning_rate: float
    ) -> None:
        config = self.config
        gradient: Array = parameter.grad * factor
        scratch: Array = gradient * (1.0 - config.beta1)
        first *= config.beta1
        first += scratch
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1.0 - config.beta2
        second *= config.beta2
        second += scratch
        np.multiply(second, 1.0 / (1.0 - config.beta2**self.step_count), out=scratch)
        np.sqrt(scratch, out=scratch)
        scratch += config.epsilon
        np.divide(first, scratch, out=scratch)
        scratch *= learning_rate / (1.0 - config.beta1**self.step_count)
        if config.weight_decay and parameter.value.ndim >= 2:
            parameter.value *= 1.0 - learning_rate * config.weight_decay
        parameter.value -= scratch


def global_norm(gradients: Iterable[Array]) -> float:
    """Return the Euclidean norm of all gradients together; parts are summed in float64."""
    return math.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients))
