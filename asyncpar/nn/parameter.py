"""Parameters, which are named arrays with gradients, and their initialization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.core.not_arrays import describe_other
from asyncpar.core.sums import is_narrow, narrowed
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[np.floating[Any]]

OnGradient: TypeAlias = Callable[[str], None]
"""Called with a parameter's name as soon as its gradient is final, from the thread that runs the backward pass."""


def check_on_host(name: str, value: object) -> None:
    """Raise ``UsageError`` if ``value`` is on a device, where numpy layers and sharded optimizers cannot use it."""
    if is_device_array(value):
        raise UsageError(
            f"parameter {name}: expected an array of numpy, which ZeRO can shard, got one on a device; train modules "
            "on devices by asyncpar.parallel.DistributedDataParallel, as asyncpar.torch.CudaModuleStage"
        )
    if not isinstance(value, np.ndarray | np.generic):  # means of arrays without dimensions are numpy's scalars
        raise UsageError(f"parameter {name}: expected an array of numpy, got {describe_other(value, 'value')}")


def add_rounded(total: Array, gradient: Array | float, at: Any) -> None:
    """Add to ``total[at]``, of two-byte values, in float32, and round."""
    with np.errstate(over="ignore", invalid="ignore"):
        total[at] = narrowed(total[at].astype(np.float32) + gradient, total.dtype)


class Parameter:
    """A trainable array and the gradient that backward passes accumulate into.

    ``value`` and ``grad`` are C-contiguous, of one shape and floating dtype: change them in place.  They stay the same
    arrays for life unless they are released, as sharded training does to save memory.  ``slice`` is this part of the
    whole tensor, and ``placement`` describes which other ranks have it.

    With ``requires_grad`` false it is *frozen*, a constant: passes add nothing to its gradient, ranks do not exchange
    it, and optimizers leave value and states unchanged (no momentum, no decay, no count of steps).  It may be set
    between steps, on all ranks alike.
    """

    __slots__ = (
        "_dtype",
        "_grad",
        "_has_added",
        "_requires_grad",
        "_sum",
        "_value",
        "memory",
        "name",
        "placement",
        "slice",
    )

    def __init__(
        self, name: str, value: Array, *, part: TensorSlice | None = None, placement: Placement = UNPLACED
    ) -> None:
        check_on_host(name, value)
        if not np.issubdtype(value.dtype, np.floating):
            raise UsageError(f"parameter {name}: expected a floating dtype, got {value.dtype}")
        if part is not None and part.local_shape != value.shape:
            raise UsageError(
                f"parameter {name}: expected the shape of its slice, {part.local_shape}, got {value.shape}"
            )
        self.name = name
        self.placement = placement
        self.slice = TensorSlice.whole(value.shape) if part is None else part
        self._dtype = value.dtype
        self._value: Array | None = np.asarray(value, order="C")
        self._grad: Array | None = np.zeros_like(self._value)
        self._sum: Array | None = None
        """A gradient of two-byte values in float32, while more is added to it; rounded when the gradient is read."""
        self._has_added = False
        self._requires_grad = True
        self.memory: ArrayPool | None = None
        """Source of memory for gradients after the first was released; None: numpy."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of value and gradient; known even while they are released."""
        return self.slice.local_shape

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which value and gradient are computed."""
        return self._dtype

    @property
    def value(self) -> Array:
        """The array itself.  Raises ``UsageError`` while it is released."""
        if self._value is None:
            raise UsageError(f"parameter {self.name}: its value is released; gather it before it is used")
        return self._value

    @value.setter
    def value(self, value: Array) -> None:
        """Set the array to ``value``, the result of ``parameter.value *= 2``, which has changed it in place."""
        self.restore_value(value)

    @property
    def grad(self) -> Array:
        """The gradient; zeros are created on access after it was released."""
        return self._rounded()

    @grad.setter
    def grad(self, gradient: Array) -> None:
        check_on_host(self.name, gradient)
        if gradient.shape != self.shape or gradient.dtype != self._dtype:
            raise UsageError(
                f"parameter {self.name}: expected a gradient of {self._dtype}{list(self.shape)}, "
                f"got {gradient.dtype}{list(gradient.shape)}"
            )
        self._forget_sum()
        self._grad = np.require(gradient, requirements=("C", "W"))

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained.  Setting it to false drops the gradient; values and states stay."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if not isinstance(requires_grad, bool):
            raise UsageError(f"parameter {self.name}: expected True or False as requires_grad, got {requires_grad!r}")
        self._requires_grad = requires_grad
        if not requires_grad:
            self.release_grad()

    @property
    def has_grad(self) -> bool:
        """Whether the gradient currently has an array."""
        return self._grad is not None

    @property
    def is_released(self) -> bool:
        """Whether the value currently has no array."""
        return self._value is None

    def accumulate(self, gradient: Array | float, at: Any = ...) -> None:
        """Add to the gradient, or to ``grad[at]``, whose indices must be unique; nothing if it is frozen.

        Gradients of two-byte values are added up in float32, and rounded when ``grad`` is read.
        """
        if not self._requires_grad:
            return
        if self._grad is None and at is ... and not is_narrow(self._stored_dtype):
            self._write_first(gradient)
            return
        total = self.grad if self._sum is None else self._sum
        if not is_narrow(total.dtype):
            total[at] += gradient
        elif not self._has_added:  # most programs add nothing more, and need no other memory
            self._has_added = True
            add_rounded(total, gradient, at)
        else:
            self._sum = total.astype(np.float32)
            self._sum[at] += gradient

    def scale_grad(self, factor: float) -> None:
        """Multiply the gradient, before it is rounded if it was added up in float32."""
        total = self._grad if self._sum is None else self._sum
        if total is not None:
            total *= np.asarray(factor, total.dtype)

    def zero_grad(self) -> None:
        """Set the accumulated gradient to zero."""
        self._forget_sum()
        if self._grad is not None:
            self._grad.fill(0.0)

    def release_grad(self) -> None:
        """Forget the gradient and free its array."""
        self._forget_sum()
        self._grad = None

    @property
    def _stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the gradient's array."""
        return self._dtype

    def _write_first(self, gradient: Array | float) -> None:
        """Make the gradient equal, to the bit, to the result of adding to zeros, without writing those first."""
        total = (np if self.memory is None else self.memory).empty(self.shape, self._stored_dtype)
        np.add(gradient, total.dtype.type(0), out=total)  # a negative zero loses its sign
        self._grad = total

    def _rounded(self) -> Array:
        """Return the gradient's array with everything that was added; it is created if necessary."""
        if self._grad is None:
            self._grad = (np if self.memory is None else self.memory).zeros(self.shape, self._stored_dtype)
        if self._sum is not None:
            self._grad[...], self._sum = narrowed(self._sum, self._grad.dtype), None
        return self._grad

    def _forget_sum(self) -> None:
        self._sum, self._has_added = None, False

    def release_value(self) -> None:
        """Release the value's array; the caller keeps what is needed to restore it."""
        self._value = None

    def restore_value(self, value: Array) -> None:
        """Use ``value``, without a copy, from now on."""
        if value.shape != self.shape or value.dtype != self._dtype or not value.flags.c_contiguous:
            raise UsageError(
                f"parameter {self.name}: expected a C-contiguous value of {self._dtype}{list(self.shape)}, "
                f"got {value.dtype}{list(value.shape)}"
            )
        self._value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={self.shape}, dtype={self._dtype})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """Draws initial values in the order of construction, so that one seed determines the whole model.

    Values are drawn in float64 and rounded to ``dtype``: models of different precision start at the same point.
    """

    rng: np.random.Generator
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise UsageError(f"dtype: expected float32 or float64, got {self.dtype}")

    @classmethod
    def from_seed(cls, seed: int, dtype: str | np.dtype[Any] = "float32") -> Initializer:
        """Return an initializer whose draws, of ``dtype``, depend on ``seed`` alone."""
        return cls(rng=np.random.default_rng(seed), dtype=np.dtype(dtype))

    def normal(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float,
        part: TensorSlice | None = None,
        placement: Placement = UNPLACED,
    ) -> Parameter:
        """Return a parameter drawn from a normal distribution around zero.

        The whole tensor, of ``shape``, is drawn, and ``part`` of it kept, so all ranks draw alike.  ``placement`` is
        the parameter's.
        """
        whole = self.draw(shape, std=std).astype(self.dtype)
        return Parameter(name, whole if part is None else part.cut(whole), part=part, placement=placement)

    def constant(
        self,
        name: str,
        shape: tuple[int, ...],
        value: float,
        *,
        part: TensorSlice | None = None,
        placement: Placement = UNPLACED,
    ) -> Parameter:
        """Return a parameter filled with ``value``, of which ``part`` is kept; draws nothing.

        ``placement`` is the parameter's.
        """
        local = shape if part is None else part.local_shape
        return Parameter(name, np.full(local, value, self.dtype), part=part, placement=placement)

    def draw(self, shape: tuple[int, ...], *, std: float) -> Array:
        """Return the next values in float64.  To skip a tensor that another rank holds, draw and discard it."""
        return self.rng.normal(0.0, std, shape)
