"""Reduce operations: what they do and for which dtypes.  Pure."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from asyncpar.errors import UsageError

Array = npt.NDArray[Any]
Combine = Callable[[Array, Array, Array], Any]
"""``combine(a, b, out)`` leaves ``a`` and ``b`` combined in ``out``, which may be one of them."""

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_BITS = ("band", "bor", "bxor")
_EXTENSION_DTYPES = frozenset({np.dtype(ml_dtypes.bfloat16)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How two buffers become one.

    ``divides`` says that the result is divided by the number of ranks at the end, ``scales`` that each input is divided
    at the start: the sum of a mean of float16 may be more than the dtype holds although the mean is not.
    """

    name: str
    combine: Combine
    divides: bool
    scales: bool = False

    def load(self, source: Array, target: Array, size: int) -> None:
        """Write an input into ``target``, which may be ``source``, as it goes into the operation."""
        if self.scales and size > 1:
            with np.errstate(invalid="ignore", under="ignore"):
                np.divide(source, np.float32(size), out=target, casting="same_kind")
        elif target is not source:
            target[...] = source

    def loaded(self, source: Array, size: int) -> Array:
        """Return an input that must not be changed as it goes into the operation: itself, or a scaled copy."""
        if not self.scales or size == 1:
            return source
        target = np.empty_like(source)
        self.load(source, target, size)
        return target

    def finish(self, result: Array, size: int) -> None:
        """Turn the combined values into the result, in place."""
        if not self.divides or size == 1:
            return
        if result.dtype.itemsize == 2:  # the divisor itself may need more bits than these dtypes have
            result[...] = (result.astype(np.float32) / np.float32(size)).astype(result.dtype)
        else:
            with np.errstate(invalid="ignore", under="ignore"):
                np.divide(result, size, out=result)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Is this a dtype that collectives can carry?  All numbers of numpy in native byte order, bool, and bfloat16."""
    return (dtype.kind in "biufc" and dtype.isnative) or dtype in _EXTENSION_DTYPES


def reduction_for(name: object, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction ``name`` for arrays of ``dtype``.

    Raises ``UsageError`` for an unknown name, and for a combination that means nothing, saying what is possible.
    """
    if not isinstance(name, str) or name not in _UFUNCS:
        raise UsageError(f"op: expected one of {', '.join(_UFUNCS)}, got {name!r}")
    if name in _BITS and dtype.kind not in "biu":
        raise UsageError(f"op: {name} works on integers and bool; {dtype} has {', '.join(possible_operations(dtype))}")
    if name == "mean" and dtype.kind in "biu":
        raise UsageError(
            f"op: mean needs a floating dtype, as {dtype} cannot hold it; "
            f"{dtype} has {', '.join(possible_operations(dtype))}"
        )
    combine = _plain(_UFUNCS[name]) if dtype.kind in "biu" else _quiet(_UFUNCS[name])
    return Reduction(name=name, combine=combine, divides=name == "mean")


def collective_reduction(name: object, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction as a collective runs it: as ``reduction_for``, but means of float16 divide at the start."""
    reduction = reduction_for(name, dtype)
    if reduction.divides and dtype == np.float16:
        return replace(reduction, divides=False, scales=True)
    return reduction


def _plain(ufunc: np.ufunc) -> Combine:
    def combine(a: Array, b: Array, out: Array) -> None:
        ufunc(a, b, out=out)

    return combine


def _quiet(ufunc: np.ufunc) -> Combine:
    """Return ``ufunc`` without warnings: infinities and NaNs are results like others, and equal on all ranks.

    numpy keeps what to ignore in a context variable; running in a context costs a tenth of setting it each time.
    """
    quiet = contextvars.Context()
    quiet.run(np.seterr, all="ignore")
    run = quiet.run

    def combine(a: Array, b: Array, out: Array) -> None:
        run(ufunc, a, b, out=out)

    return combine


def possible_operations(dtype: np.dtype[Any]) -> list[str]:
    """Return the names of the reduce operations that ``dtype`` has."""
    if dtype.kind in "biu":
        return [name for name in _UFUNCS if name != "mean"]
    return [name for name in _UFUNCS if name not in _BITS]
