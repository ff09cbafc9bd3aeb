"""The update rule of an optimizer on one range of values."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array

BLOCK = 1 << 15
"""Values that are updated at a time, so that the rule's data stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """An update rule and its settings.  It has no state: that belongs to the owner of the values.

    Everything is elementwise, so an array gets the same bits whole or in slices, on any rank.  ``weight_decay`` applies
    if the caller requests it; optimizers do so for parameters of two or more dimensions, not for biases and
    normalization.
    """

    weight_decay: float = 0.0

    def __new__(cls, *given: object, **settings: object) -> Self:
        """Refuse the arguments of other libraries' optimizers, with the line to write."""
        try:
            inspect.signature(cls.__init__).bind(None, *given, **settings)
        except TypeError as error:
            raise UsageError(
                f"{cls.__name__}: {error}; a rule has settings by name, and neither parameters nor a learning rate: "
                f"write `optimizer = Optimizer(parameters, {cls.__name__}())`, and `optimizer.step(learning_rate)`"
            ) from error
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not self.weight_decay >= 0.0:
            raise UsageError(f"weight_decay: expected a number >= 0, got {self.weight_decay}")

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """The names of the state per value: one array for each name, all zeros before the first step."""

    @abstractmethod
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
        """Move ``value`` against ``gradient``, in place, and update ``states``.

        All arrays have one shape and dtype; ``gradient`` is not changed.  ``step`` counts from 1.  Needs additional
        memory of the size of two of the arrays.
        """


def new_states(rule: Rule, count: int, dtype: np.dtype[Any]) -> MutableMapping[str, Array]:
    """Return the states of ``count`` values before the first step."""
    return {name: np.zeros(count, dtype) for name in rule.state_names}


def apply(
    rule: Rule,
    value: Array,
    gradient: Array,
    states: Mapping[str, Array],
    *,
    step: int,
    learning_rate: float,
    decays: bool,
    factor: float = 1.0,
    fill: Callable[[slice], object] | None = None,
) -> None:
    """Apply ``rule.update`` to ``factor * gradient``, block by block, with one block of temporary memory.

    All arrays are flat.  ``gradient`` may have another dtype than the others; it is multiplied in theirs.  ``fill`` is
    called with each block before it is updated, and copies values and states there if necessary.
    """
    for start in range(0, value.size, BLOCK):
        part = slice(start, start + BLOCK)
        if fill is not None:
            fill(part)
        block = gradient[part]
        if block.dtype != value.dtype:
            block = block.astype(value.dtype)
        if factor != 1.0:
            block = block * factor
        rule.update(
            value[part],
            block,
            {name: state[part] for name, state in states.items()},
            step=step,
            learning_rate=learning_rate,
            decays=decays,
        )


def check_fraction(name: str, fraction: float) -> None:
    """Raise ``UsageError`` unless ``fraction`` can be the decay of a running average: 0 <= fraction < 1."""
    if not 0.0 <= fraction < 1.0:
        raise UsageError(f"{name}: expected 0 <= {name} < 1, got {fraction}")
