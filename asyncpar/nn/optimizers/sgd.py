"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncpar.errors import UsageError
from asyncpar.nn.optimizers.rule import Rule, check_fraction
from asyncpar.nn.parameter import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Rule):
    """Gradient descent with momentum (Polyak 1964) that may look ahead (Nesterov 1983, as in Sutskever et al. 2013).

    The momentum is ``m = momentum * m + gradient`` and is not multiplied by the learning rate.  ``weight_decay`` times
    the value is added to the gradient.

    With ``nesterov`` it looks ahead.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        check_fraction("momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov: expected a momentum > 0 to look ahead with, got 0.0")

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self,
        value: Array,
        gradient: Array,
        states: Mapping[str, Array],
        *,
        step: int,  # noqa: ARG002
        learning_rate: float,
        decays: bool,
    ) -> None:
        if self.weight_decay and decays:
            gradient = gradient + self.weight_decay * value
        if self.momentum:
            moment = states["momentum"]
            moment *= self.momentum
            moment += gradient
            gradient = gradient + self.momentum * moment if self.nesterov else moment
        value -= learning_rate * gradient
