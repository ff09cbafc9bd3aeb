"""Check what callers pass, before anything is sent.  Errors name the argument, what was expected and given.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncpar.collectives.ledger import LARGEST_TAG
from asyncpar.collectives.reduction import Array, is_numeric
from asyncpar.errors import UsageError


def check_array(value: object, name: str = "x") -> Array:
    """Return ``value`` as a plain array, over the same memory, if it is one that collectives can carry."""
    if not isinstance(value, np.ndarray):
        raise UsageError(f"{name}: expected a numpy array, got {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{name}: expected an array without a mask, got a masked one; pass its filled()")
    if not is_numeric(value.dtype):
        raise UsageError(f"{name}: expected a numeric dtype in native byte order, got {value.dtype!r}")
    return value if type(value) is np.ndarray else np.asarray(value)


def check_writable(array: Array, name: str) -> Array:
    """Return ``array`` if results can be written into it."""
    if not array.flags.writeable:
        raise UsageError(f"{name}: expected an array that can be written, got a read-only one")
    return array


def check_out(out: object, shape: Sequence[int], dtype: np.dtype[Any], *, of: str = "the result") -> Array:
    """Return ``out`` if it can take a result of ``shape`` and ``dtype``; a fresh array if it is None."""
    if out is None:
        return np.empty(shape, dtype)
    array = check_writable(check_array(out, "out"), "out")
    if array.shape != tuple(shape) or array.dtype != dtype:
        raise UsageError(f"out: expected {dtype}{list(shape)} for {of}, got {array.dtype}{list(array.shape)}")
    return array


def check_apart(array: Array, out: Array) -> None:
    """Raise unless the two share no memory."""
    if np.may_share_memory(array, out):
        raise UsageError("out: expected other memory than x, got an array that overlaps it")


def check_rank(value: object, size: int, name: str = "root") -> int:
    """Return ``value`` if it is a rank of a group of ``size``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
        raise UsageError(f"{name}: expected a rank 0..{size - 1} of the group, got {value!r}")
    return int(value)


def check_only_root(value: object, name: str, rank: int, root: int) -> None:
    """Raise if a rank that is not the root passes what only the root may."""
    if value is not None and rank != root:
        raise UsageError(f"{name}: expected None on rank {rank} of the group, as only root {root} uses it")


def check_rows(array: Array, name: str = "x") -> Array:
    """Return ``array`` if it has an axis 0."""
    if array.ndim == 0:
        raise UsageError(f"{name}: expected an array with at least one dimension, got a scalar array")
    return array


def check_leading(array: Array, size: int, name: str = "x") -> Array:
    """Return ``array`` if its axis 0 has one entry per rank."""
    if array.ndim == 0 or array.shape[0] != size:
        raise UsageError(f"{name}: expected shape ({size}, ...), one entry per rank, got {array.shape}")
    return array


def check_counts(counts: object, size: int, rows: int, name: str = "counts") -> list[int]:
    """Return ``counts`` as integers if they say how many of ``rows`` rows go to each rank."""
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
    """Return ``tag`` if messages can carry it."""
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag <= LARGEST_TAG:
        raise UsageError(f"tag: expected an integer 0..{LARGEST_TAG}, got {tag!r}")
    return int(tag)


def check_key(key: object) -> str | None:
    """Return ``key`` if it names an operation."""
    if key is not None and (not isinstance(key, str) or not key):
        raise UsageError(f"key: expected a name of at least one character or None, got {key!r}")
    return key


def contiguous(array: Array) -> Array:
    """Return the elements of ``array`` as a contiguous array: itself, or a copy."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
