"""AdamW over whole parameters, with clipping: what training in one process or data-parallel training needs.

``asyncpar.nn.optimizers`` has the update rules by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn import optimizers as rules
from asyncpar.nn.half import stored_value
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
        rule = rules.AdamW(
            beta1=config.beta1, beta2=config.beta2, epsilon=config.epsilon, weight_decay=config.weight_decay
        )
        self._stretches = [rules.Stretch(parameter, 0, parameter.size, rule) for parameter in self.parameters]

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
        for stretch in self._stretches:
            stretch.update(
                stretch.of(stored_value(stretch.parameter)),
                stretch.of(stretch.parameter.grad),
                step=self.step_count,
                learning_rate=learning_rate,
                factor=factor,
            )
        return norm


def global_norm(gradients: Iterable[Array]) -> float:
    """Return the Euclidean norm of all gradients together; parts are summed in float64."""
    return math.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients))
