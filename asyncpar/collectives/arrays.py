"""Arrays of collective operations: their checks, and how they are reduced.  Pure.

Errors of checks name the argument, the expected value and the actual one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from asyncpar.collectives.ledger import LARGEST_TAG
from asyncpar.core.foreign_arrays import foreign_array, is_foreign
from asyncpar.core.not_arrays import describe_other
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
LARGEST_LENGTH = 1 << 40
"""No rank has more rows than this."""

_BITS = ("band", "bor", "bxor")
_EXTENSION_DTYPES = frozenset({np.dtype(ml_dtypes.bfloat16)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduce operation on two buffers.

    ``divides`` means that the result is divided by the number of ranks at the end, ``scales`` that each input is
    divided at the start: the sum behind a mean of float16 may exceed the dtype's range although the mean does not.
    """

    name: str
    combine: Combine
    divides: bool
    scales: bool = False

    def load(self, source: Array, target: Array, size: int) -> None:
        """Write an input, as the operation takes it, into ``target``, which may be ``source``."""
        if self.scales and size > 1:
            with np.errstate(invalid="ignore", under="ignore"):
                np.divide(source, np.float32(size), out=target, casting="same_kind")
        elif target is not source:
            target[...] = source

    def loaded(self, source: Array, size: int) -> Array:
        """Return an input that must not be modified, as the operation takes it: itself, or a scaled copy."""
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
    """Return whether collectives can carry this dtype: numpy's numbers in native byte order, bool, and bfloat16."""
    return (dtype.kind in "biufc" and dtype.isnative) or dtype in _EXTENSION_DTYPES


def reduction_for(name: object, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction ``name`` for arrays of ``dtype``.

    Raises ``UsageError`` for an unknown name, and for a meaningless combination; the message lists what is possible.
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
    """Return the reduction as collectives run it: like ``reduction_for``, but means of float16 divide at the start."""
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

    numpy keeps the ignored errors in a context variable; running in a context costs a tenth of setting it each time.
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


def check_array(value: object, name: str = "x") -> Array:
    """Return ``value`` as a plain array over the same memory; raise unless collectives can carry it."""
    if not isinstance(value, np.ndarray):
        if not is_foreign(value):
            raise UsageError(f"{name}: expected a numpy array, got {describe_other(value, name)}")
        value = foreign_array(value, name).view
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):  # numpy loads `ma` on first access
        raise UsageError(f"{name}: expected an array without a mask, got a masked one; pass its filled()")
    if not is_numeric(value.dtype):
        raise UsageError(f"{name}: expected a numeric dtype in native byte order, got {value.dtype!r}")
    return value if type(value) is np.ndarray else np.asarray(value)


def check_writable(array: Array, name: str) -> Array:
    """Return ``array``; raise unless results can be written into it."""
    if not array.flags.writeable:
        raise UsageError(f"{name}: expected an array that can be written, got a read-only one")
    return array


MakeArray: TypeAlias = Callable[[Sequence[int], np.dtype[Any]], Array]
"""Returns an array of a shape and dtype, of undefined content."""


def check_out(
    out: object, shape: Sequence[int], dtype: np.dtype[Any], *, of: str = "the result", make: MakeArray = np.empty
) -> Array:
    """Return ``out`` if it fits a result of ``shape`` and ``dtype``, or an array from ``make`` if it is None."""
    if out is None:
        return make(shape, dtype)
    array = check_writable(check_array(out, "out"), "out")
    if array.shape != tuple(shape) or array.dtype != dtype:
        raise UsageError(f"out: expected {dtype}{list(shape)} for {of}, got {array.dtype}{list(array.shape)}")
    return array


def check_apart(array: Array, out: Array) -> None:
    """Raise if the two share memory."""
    if np.may_share_memory(array, out):
        raise UsageError("out: expected other memory than x, got an array that overlaps it")


def check_rank(value: object, size: int, name: str = "root") -> int:
    """Return ``value``; raise unless it is a rank of a group of ``size``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
        raise UsageError(f"{name}: expected a rank 0..{size - 1} of the group, got {value!r}")
    return int(value)


def check_only_root(value: object, name: str, rank: int, root: int) -> None:
    """Raise if a rank other than the root passes an argument that only the root may pass."""
    if value is not None and rank != root:
        raise UsageError(f"{name}: expected None on rank {rank} of the group, as only root {root} uses it")


def check_rows(array: Array, name: str = "x") -> Array:
    """Return ``array``; raise unless it has an axis 0."""
    if array.ndim == 0:
        raise UsageError(f"{name}: expected an array with at least one dimension, got a scalar array")
    return array


def check_leading(array: Array, size: int, name: str = "x") -> Array:
    """Return ``array``; raise unless its axis 0 has one entry per rank."""
    if array.ndim == 0 or array.shape[0] != size:
        raise UsageError(f"{name}: expected shape ({size}, ...), one entry per rank, got {array.shape}")
    return array


def check_counts(counts: object, size: int, rows: int, name: str = "counts") -> list[int]:
    """Return ``counts`` as integers; raise unless they distribute ``rows`` rows to all ranks."""
    if not isinstance(counts, Sequence | np.ndarray) or isinstance(counts, str | bytes):
        raise UsageError(f"{name}: expected {size} integers, got {type(counts).__name__}")
    numbers = list(counts)
    if len(numbers) != size or not all(
        isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 0 for count in numbers
    ):
        raise UsageError(f"{name}: expected {size} integers of 0 or more, got {numbers!r}")
    if sum(numbers) != rows:
        raise UsageError(f"{name}: expected counts that add up to the {rows} rows of x, got a sum of {sum(numbers)}")
    return [int(count) for count in numbers]


def check_tag(tag: object) -> int:
    """Return ``tag``; raise unless messages can carry it."""
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag <= LARGEST_TAG:
        raise UsageError(f"tag: expected an integer 0..{LARGEST_TAG}, got {tag!r}")
    return int(tag)


def check_key(key: object) -> str | None:
    """Return ``key``; raise unless it can name an operation."""
    if key is not None and (not isinstance(key, str) or not key):
        raise UsageError(f"key: expected a name of at least one character or None, got {key!r}")
    return key


def contiguous(array: Array) -> Array:
    """Return the elements of ``array`` as a contiguous array: itself, or a copy."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


_SMALLEST = 64 << 10


KEPT_BYTES = 8 << 20


class StagingPool:
    """Lends byte arrays.  Keeps up to ``kept_bytes`` of returned ones, because fresh pages are slow."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._held = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of ``count`` elements, to be given back after use."""
        length = count * dtype.itemsize
        if length < _SMALLEST:
            return np.empty(count, dtype)
        rounded = 1 << (length - 1).bit_length()
        free = self._free.get(rounded)
        if free:
            self._held -= rounded
            block = free.pop()
        else:
            block = np.empty(rounded, np.uint8)
        return block[:length].view(dtype)

    def give_back(self, array: npt.NDArray[Any]) -> None:
        """Take back an array from ``take``; no view of it may be in use."""
        block = array.base
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or block.nbytes < _SMALLEST:
            return
        if self._held + block.nbytes <= self._kept_bytes:
            self._held += block.nbytes
            self._free.setdefault(block.nbytes, []).append(block)
