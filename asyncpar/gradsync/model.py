"""What gradient synchronization asks of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.config.placement import UNPLACED, Placement
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
