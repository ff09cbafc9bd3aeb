"""Worlds on virtual time, and what all ranks of them get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from asyncpar.collectives.arrays import Array
from asyncpar.tensors import TensorCommunicator
from asyncpar.testing import local_world, run_virtual

T = TypeVar("T")

PATIENCE = 1000.0
"""Virtual seconds after which ranks are taken for hung: more than any timeout of an operation."""

DTYPES = (np.float32, np.float64, np.int16, np.int64, np.complex64, np.bool_, ml_dtypes.bfloat16)

SIZES = st.integers(1, 5)
"""Numbers of ranks."""


def outcomes(size: int, main: Callable[[TensorCommunicator], Awaitable[T]], **world: Any) -> list[Any]:
    """Run ``main`` on all ranks of a world and return what it returned or raised on each."""

    async def on_all() -> list[Any]:
        async with local_world(size, **world) as nodes, asyncio.timeout(PATIENCE):
            running = (main(TensorCommunicator(node.world)) for node in nodes)
            return await asyncio.gather(*running, return_exceptions=True)

    return run_virtual(on_all())


def on_world(size: int, main: Callable[[TensorCommunicator], Awaitable[T]]) -> list[T]:
    """Run ``main`` on all ranks of a world and return the results in the order of ranks."""
    results = outcomes(size, main)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def draw_tensor(shape: Sequence[int], seed: int, dtype: Any = np.float64) -> Array:
    """Return whole numbers, the same for the same ``seed``, that any dtype holds and adds up without rounding."""
    return np.random.default_rng(seed).integers(0, 9, size=tuple(shape)).astype(dtype)


def scrambled(tensor: Array, layout: int) -> Array:
    """Return an equal array of another memory layout."""
    if layout == 0:
        return tensor
    if layout == 1:
        return np.asfortranarray(tensor)
    wide = np.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2), tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@st.composite
def shapes_and_dims(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Shapes of one to three dimensions, short and empty ones too, and one of the dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    return shape, draw(st.integers(0, len(shape) - 1))
