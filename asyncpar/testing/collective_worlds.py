"""Shared by the parts of the communicator suite: worlds, operations on all ranks, and arrays to move."""

from __future__ import annotations

import asyncio
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import reduce
from typing import Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator

T = TypeVar("T")

DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")),
    np.dtype(ml_dtypes.bfloat16),
)

COMBINED: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
"""The numpy functions of reduce operations, by name."""


class CommunicatorSuite(ABC):
    """The factory of the communicators under test.  ``sizes`` are the numbers of ranks to try."""

    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 8)

    @abstractmethod
    def connect(self, size: int) -> AbstractAsyncContextManager[Sequence[Communicator]]:
        """Return the communicators of a fresh world of ``size`` ranks, in the order of ranks.

        Return those of all ranks, or of the ranks in this process, at least one; in the latter case every process runs
        the suite, and a world must not end before all processes have left it.
        """


async def on_all(communicators: Sequence[Communicator], operation: Callable[[Communicator], Awaitable[T]]) -> list[T]:
    """Run ``operation`` on every rank of this process at once and return the results in the order of ranks."""
    return list(await asyncio.gather(*(operation(communicator) for communicator in communicators)))


def ranked(communicators: Sequence[Communicator], results: Sequence[T]) -> list[tuple[int, T]]:
    """Pair ``results``, which are in the order of ``communicators``, with their ranks."""
    return list(zip((communicator.rank for communicator in communicators), results, strict=True))


async def errors_on_all(
    communicators: Sequence[Communicator], operation: Callable[[Communicator], Coroutine[Any, Any, Any]]
) -> list[BaseException]:
    """Run ``operation`` on every rank of this process at once; return the error of each."""
    running = (operation(communicator) for communicator in communicators)
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(errors) == len(communicators), f"expected an error on every rank, got {outcomes}"
    return errors


def values(rank: int, shape: int | tuple[int, ...], dtype: Any = np.float64) -> Array:
    """Return small whole numbers that every dtype holds and sums exactly, different on every rank."""
    return _numbers(rank, math.prod(shape) if isinstance(shape, tuple) else shape).astype(dtype).reshape(shape)


@functools.lru_cache(maxsize=64)
def _numbers(rank: int, count: int) -> Array:
    return (np.arange(count) * (rank + 3) + rank) % 5


def noise(rank: int, count: int) -> Array:
    """Return numbers whose sum depends on the order of summation in its last bits."""
    return _noise(rank, count).copy()


@functools.lru_cache(maxsize=16)
def _noise(rank: int, count: int) -> Array:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def assert_same(actual: Any, expected: Any, message: str = "") -> None:
    """Compare as ``np.testing.assert_array_equal`` does, at a tenth of its cost if arrays are equal."""
    if not np.array_equal(actual, expected):
        np.testing.assert_array_equal(actual, expected, message)


def combined(op: str, arrays: Sequence[Array]) -> Array:
    """Return numpy's combination of ``arrays``."""
    return reduce(COMBINED[op], arrays)
