"""Parameters that are stored in half precision and used in single precision.

Micikevicius et al. 2018, Mixed Precision Training: values and gradients take two bytes each, layers work on temporary
float32 copies of values, and the optimizer keeps float32 *master* values, in which updates that are too small for half
precision add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, Initializer, Parameter

_STORED: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


class HalfParameter(Parameter):
    """A parameter whose ``stored`` value and ``grad`` are bfloat16 or float16; ``value`` is a float32 copy.

    The copy is read-only, since writes to it would be lost: assign to ``value`` instead.  Values beyond the range of
    float16 become infinite, in gradients too.
    """

    __slots__ = ("storage",)

    def __init__(
        self,
        name: str,
        value: Array,
        *,
        storage: str | np.dtype[Any] = "bfloat16",
        part: TensorSlice | None = None,
        placement: Placement = UNPLACED,
    ) -> None:
        if value.dtype != np.float32:
            raise UsageError(f"parameter {name}: expected float32 values to store in {storage}, got {value.dtype}")
        super().__init__(name, value, part=part, placement=placement)
        self.storage = half_dtype(storage)
        self._value = rounded(value, self.storage)
        self._grad = np.zeros(self.shape, self.storage)

    @property
    def stored(self) -> Array:
        """The array in half precision.  Raises ``UsageError`` while it is released."""
        return super().value

    @property
    def value(self) -> Array:
        """A read-only copy in float32, made by each access.  Raises ``UsageError`` while it is released."""
        copy = self.stored.astype(np.float32)
        copy.flags.writeable = False
        return copy

    @value.setter
    def value(self, value: Array) -> None:
        self.restore_value(value)

    @property
    def grad(self) -> Array:
        """The stored gradient; zeros are created on access after it was released."""
        return self._rounded()

    @grad.setter
    def grad(self, gradient: Array) -> None:
        fitting = self._fitting(gradient, "a gradient")
        self._forget_sum()
        self._grad = np.require(fitting, requirements=("C", "W"))

    def restore_value(self, value: Array) -> None:
        """Use ``value`` from now on: without a copy if it is of half precision, rounded if it is float32."""
        self._value = self._fitting(value, "a C-contiguous value")

    @property
    def _stored_dtype(self) -> np.dtype[Any]:
        return self.storage

    def _fitting(self, array: Array, what: str) -> Array:
        if array.shape != self.shape or array.dtype not in (self.storage, self.dtype) or not array.flags.c_contiguous:
            raise UsageError(
                f"parameter {self.name}: expected {what} of {self.storage} or {self.dtype}{list(self.shape)}, "
                f"got {array.dtype}{list(array.shape)}"
            )
        return array if array.dtype == self.storage else rounded(array, self.storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfInitializer(Initializer):
    """Draws the values of ``Initializer``, and stores them in half precision."""

    storage: np.dtype[Any]

    def __post_init__(self) -> None:
        if self.dtype != np.float32:
            raise UsageError(f"dtype: expected float32 to compute in beside {self.storage}, got {self.dtype}")

    @classmethod
    def from_seed(
        cls, seed: int, dtype: str | np.dtype[Any] = "float32", storage: str | np.dtype[Any] = "bfloat16"
    ) -> HalfInitializer:
        """Return an initializer whose draws depend on ``seed`` alone."""
        return cls(rng=np.random.default_rng(seed), dtype=np.dtype(dtype), storage=half_dtype(storage))

    def normal(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float,
        part: TensorSlice | None = None,
        placement: Placement = UNPLACED,
    ) -> Parameter:
        """Draw like ``Initializer.normal``."""
        return self._halved(Initializer.normal(self, name, shape, std=std, part=part, placement=placement))

    def constant(
        self,
        name: str,
        shape: tuple[int, ...],
        value: float,
        *,
        part: TensorSlice | None = None,
        placement: Placement = UNPLACED,
    ) -> Parameter:
        """Fill like ``Initializer.constant``."""
        return self._halved(Initializer.constant(self, name, shape, value, part=part, placement=placement))

    def _halved(self, single: Parameter) -> HalfParameter:
        return HalfParameter(
            single.name, single.value, storage=self.storage, part=single.slice, placement=single.placement
        )


def half_dtype(name: str | np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype called bfloat16 or float16.  Raises ``UsageError`` for any other."""
    found = _STORED.get(str(name))
    if found is None:
        raise UsageError(f"storage: expected {' or '.join(_STORED)}, got {name}")
    return found


def rounded(values: Array, storage: np.dtype[Any]) -> Array:
    """Return a C-contiguous copy in ``storage``; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(storage, order="C")


def stored_dtype(parameter: Parameter) -> np.dtype[Any]:
    """Return the dtype in which value and gradient of any parameter are stored."""
    return parameter.storage if isinstance(parameter, HalfParameter) else parameter.dtype


def stored_value(parameter: Parameter) -> Array:
    """Return the array that holds the value of any parameter, not a copy.  Raises ``UsageError`` while released."""
    return parameter.stored if isinstance(parameter, HalfParameter) else parameter.value
