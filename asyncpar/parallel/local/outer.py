"""The outer optimizer of local training: plain computation, no communication.

All ranks leave a common point with their own steps.  A *difference* is a rank's movement since then, common point minus
current value: a pseudo-gradient, whose mean over ranks moves the common point::

    momentum <- outer_momentum * momentum + mean
    common   <- common - outer_learning_rate * (mean + outer_momentum * momentum)

This is SGD with Nesterov's momentum as of Sutskever et al. 2013, the outer optimizer of DiLoCo (Douillard et al. 2023).
With rate 1 and momentum 0 the new common point is the mean of all ranks: local SGD (Stich 2019).  All ranks compute
the same from the same mean, so their common points stay equal to the last bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import is_frozen
from asyncpar.core.not_arrays import describe_no_parameter
from asyncpar.errors import NonFiniteValue, UsageError

Array: TypeAlias = NDArray[np.floating[Any]]


class HasValue(Protocol):
    """Anything with a name and an array that training changes in place, such as ``nn.Parameter``."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Rate and momentum of the outer optimizer; the defaults are those of DiLoCo.

    ``learning_rate`` is the length of the outer step in units of the mean difference.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0.0 and math.isfinite(self.learning_rate)):
            raise UsageError(f"outer_learning_rate: expected a positive number, got {self.learning_rate}")
        if not 0.0 <= self.momentum < 1.0:
            raise UsageError(f"outer_momentum: expected 0 <= outer_momentum < 1, got {self.momentum}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterDifference:
    """The distance of a parameter from the common point, with the interface of a gradient, to be reduced like one."""

    name: str
    grad: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterState:
    """Copies of the common point and of the momentum, by name; equal on all ranks."""

    common: Mapping[str, Array]
    momentum: Mapping[str, Array]


def outer_step(config: OuterConfig, old: Array, momentum: Array, mean: Array, *, common: Array, moved: Array) -> None:
    """Write the new ``common`` point, which was ``old``, and its ``moved`` momentum, for a ``mean`` difference."""
    np.multiply(momentum, config.momentum, out=moved)
    moved += mean
    np.multiply(moved, config.momentum, out=common)
    common += mean
    common *= -config.learning_rate
    common += old


class OuterOptimizer:
    """Holds the common point of ``parameters``, which is their current value, and its momentum.

    For each round: ``measure``; replace the differences by their means over ranks; ``advance``.  A round that is
    abandoned in between leaves no trace.  Takes three times the memory of the parameters.

    Frozen parameters do not move, and keep their momentum.
    """

    def __init__(self, parameters: Iterable[HasValue], config: OuterConfig) -> None:
        self.config = config
        self._parameters = _by_name(parameters)
        self._common = {name: parameter.value.copy() for name, parameter in self._parameters.items()}
        self._momentum = {name: np.zeros_like(common) for name, common in self._common.items()}
        self.differences = tuple(
            OuterDifference(name=name, grad=np.zeros_like(common)) for name, common in self._common.items()
        )

    @property
    def nbytes(self) -> int:
        """Size of the parameters in bytes."""
        return sum(common.nbytes for common in self._common.values())

    def measure(self) -> None:
        """Compute the differences."""
        for difference in self.differences:
            np.subtract(self._common[difference.name], self._parameters[difference.name].value, out=difference.grad)

    def advance(self) -> None:
        """Move the common point by the differences, which must be means now, and all parameters to it.

        Raises ``NonFiniteValue``, on all ranks alike and with nothing changed, when that would be NaN or infinite.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # checked before anything is written
            moving = [one for one in self.differences if not is_frozen(self._parameters[one.name])]
            proposals = [self._propose(difference) for difference in moving]
        broken = [one.name for one, (common, _) in zip(moving, proposals, strict=True) if not _is_finite(common)]
        if broken:
            raise NonFiniteValue(f"outer step: expected finite parameters, got NaN or infinity in {', '.join(broken)}")
        for difference, (common, momentum) in zip(moving, proposals, strict=True):
            self._common[difference.name], self._momentum[difference.name] = common, momentum
            self._parameters[difference.name].value[...] = common

    def reset(self) -> None:
        """Reset all parameters to the common point."""
        for name, parameter in self._parameters.items():
            parameter.value[...] = self._common[name]

    def digest(self) -> str:
        """Return a short hash over all bits of the common point."""
        hasher = hashlib.sha256()
        for common in self._common.values():
            hasher.update(np.ascontiguousarray(common).data)
        return hasher.hexdigest()[:16]

    def state(self) -> OuterState:
        """Return the state for ``restore``."""
        return OuterState(
            common={name: array.copy() for name, array in self._common.items()},
            momentum={name: array.copy() for name, array in self._momentum.items()},
        )

    def restore(self, state: OuterState) -> None:
        """Continue from ``state``; parameters do not change.

        Raises ``UsageError``, with nothing changed, unless it has the names, shapes and dtypes of the parameters.
        """
        for what, arrays in (("common", state.common), ("momentum", state.momentum)):
            self._check(what, arrays)
        for name in self._common:
            self._common[name] = state.common[name].copy()
            self._momentum[name] = state.momentum[name].copy()

    def _propose(self, difference: OuterDifference) -> tuple[Array, Array]:
        """Return the new common point and the new momentum of a parameter, in new arrays."""
        old, momentum = self._common[difference.name], self._momentum[difference.name]
        common, moved = np.empty_like(old), np.empty_like(old)
        outer_step(self.config, old, momentum, difference.grad, common=common, moved=moved)
        return common, moved

    def _check(self, what: str, arrays: Mapping[str, Array]) -> None:
        if set(arrays) != set(self._common):
            different = ", ".join(sorted(set(arrays) ^ set(self._common)))
            raise UsageError(f"state: expected {what} of the same parameters, but these differ: {different}")
        for name, expected in self._common.items():
            got = arrays[name]
            if (got.shape, got.dtype) != (expected.shape, expected.dtype):
                raise UsageError(
                    f"state: expected {what} of {name} as {expected.dtype}{list(expected.shape)}, "
                    f"got {got.dtype}{list(got.shape)}"
                )


def _is_finite(array: Array) -> bool:
    return bool(np.isfinite(array).all())


def _by_name(parameters: Iterable[HasValue]) -> dict[str, HasValue]:
    """Return parameters by name, in their order."""
    by_name: dict[str, HasValue] = {}
    for parameter in _checked(parameters):
        if parameter.name in by_name:
            raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
        by_name[parameter.name] = parameter
    if not by_name:
        raise UsageError("parameters: expected at least one parameter, got none")
    return by_name


def _checked(parameters: Iterable[HasValue]) -> Iterator[HasValue]:
    for parameter in parameters:
        if getattr(parameter, "name", None) is None or not hasattr(parameter, "value"):
            raise UsageError(describe_no_parameter(parameter))
        if not np.issubdtype(parameter.value.dtype, np.floating):
            raise UsageError(f"parameter {parameter.name}: expected a floating dtype, got {parameter.value.dtype}")
        yield parameter
