"""Gradients as this package takes them, and their sums over micro-steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import GradientSpec


class HasGradient(Protocol):
    """Anything with a name and a gradient array, such as ``nn.Parameter``.

    It may have a ``placement``, too, a ``Placement``: see there who needs one.
    """

    @property
    def name(self) -> str: ...

    @property
    def grad(self) -> NDArray[np.floating[Any]]: ...


class ModelShards(Protocol):
    """Anything that lists this rank's parameters in registration order, such as ``nn.Stage``."""

    def parameters(self) -> Iterable[HasGradient]: ...


Parameters: TypeAlias = Mapping[str, HasGradient]


def parameters_by_name(parameters: Iterable[HasGradient]) -> dict[str, HasGradient]:
    """Return parameters by name, in registration order.  Raises ``UsageError`` for a name that occurs twice."""
    by_name: dict[str, HasGradient] = {}
    for parameter in parameters:
        if parameter.name in by_name:
            raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
        by_name[parameter.name] = parameter
    return by_name


def spec_of(parameter: HasGradient) -> GradientSpec:
    """Describe a parameter."""
    placement = getattr(parameter, "placement", UNPLACED)
    if not isinstance(placement, Placement):
        raise UsageError(f"parameter {parameter.name}: expected a Placement as its placement, got {placement!r}")
    gradient = parameter.grad
    return GradientSpec(name=parameter.name, shape=gradient.shape, dtype=gradient.dtype, placement=placement)


@dataclass(slots=True)
class Accumulation:
    """Sums of gradients by parameter's name, of their shapes and dtypes, and of how many micro-steps."""

    sums: dict[str, NDArray[Any]] = field(default_factory=dict)
    micro_steps: int = 0

    def add(self, parameters: Sequence[HasGradient]) -> None:
        """Take the gradients and leave zeros.  Raises ``UsageError``, with nothing taken, for ones that do not fit."""
        if self.micro_steps:
            self.check(parameter.name for parameter in parameters)
        for parameter in parameters:
            kept, gradient = self.sums.get(parameter.name), parameter.grad
            if kept is not None and (kept.shape, kept.dtype) != (gradient.shape, gradient.dtype):
                raise UsageError(
                    f"parameter {parameter.name}: expected a gradient as in earlier micro-steps, "
                    f"{kept.dtype}{list(kept.shape)}, got {gradient.dtype}{list(gradient.shape)}"
                )
        for parameter in parameters:
            if parameter.name in self.sums:
                self.sums[parameter.name] += parameter.grad
            else:
                self.sums[parameter.name] = parameter.grad.copy()
            parameter.grad.fill(0.0)
        self.micro_steps += 1

    def check(self, names: Iterable[str]) -> None:
        """Raise ``UsageError`` unless ``names`` are those accumulated, or nothing is."""
        odd = sorted(set(names) ^ set(self.sums)) if self.micro_steps else []
        if odd:
            raise UsageError(f"parameters: expected those of earlier micro-steps, but {odd[0]!r} is in one set only")

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(values.nbytes for values in self.sums.values())

    def clear(self) -> None:
        """Forget all sums."""
        self.sums, self.micro_steps = {}, 0
