"""Gradients of parameters that had none, to which something is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.core.array_pool import ArrayPool
from asyncpar.nn import Parameter

SHAPE = (3, 100_000)
RNG = np.random.default_rng(1)
GRADIENTS: dict[str, Any] = {
    "a number": 1.5,
    "a minus zero": -0.0,
    "a scalar of numpy": np.float64(0.1),
    "values of the same dtype": RNG.standard_normal(SHAPE).astype(np.float32),
    "wider values": RNG.standard_normal(SHAPE),
    "narrower values": RNG.standard_normal(SHAPE).astype(np.float16),
    "integers": np.arange(300_000).reshape(SHAPE).astype(np.int16),
    "every other column": RNG.standard_normal((3, 200_000)).astype(np.float32)[:, ::2],
    "transposed values": RNG.standard_normal(SHAPE[::-1]).astype(np.float32).T,
    "one row for all": RNG.standard_normal(SHAPE[1:]).astype(np.float32),
    "what is not finite, and zeros with a minus": np.resize(
        np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32), SHAPE
    ),
}


@pytest.mark.parametrize("memory", [None, lambda: ArrayPool(is_mapped=True)], ids=["numpy's", "a pool's"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_what_comes_first_is_to_the_bit_what_is_added_to_zeros(
    gradient: Any, dtype: type[Any], memory: Callable[[], ArrayPool] | None
) -> None:
    parameter, other = (Parameter("w", np.ones(SHAPE, dtype)) for _ in range(2))
    parameter.memory = None if memory is None else memory()
    parameter.release_grad()
    for _ in range(2):
        parameter.accumulate(gradient)
        other.accumulate(gradient)
        assert parameter.grad.dtype == dtype
        assert parameter.grad.flags.c_contiguous
        assert parameter.grad.tobytes() == other.grad.tobytes()


def test_a_gradient_is_no_view_of_what_was_added() -> None:
    parameter = Parameter("w", np.ones(4, np.float32))
    parameter.release_grad()
    added = np.ones(4, np.float32)
    parameter.accumulate(added)
    added.fill(7.0)
    assert parameter.grad.tolist() == [1.0] * 4


def test_what_does_not_fit_is_refused_and_leaves_no_gradient() -> None:
    parameter = Parameter("w", np.ones(4, np.float32))
    parameter.release_grad()
    with pytest.raises(ValueError, match="broadcast"):
        parameter.accumulate(np.ones(3, np.float32))
    assert not parameter.has_grad


def test_a_part_of_a_released_gradient_is_added_to_zeros() -> None:
    parameter = Parameter("w", np.ones(4, np.float32))
    parameter.release_grad()
    parameter.accumulate(2.0, at=slice(1, 3))
    assert parameter.grad.tolist() == [0.0, 2.0, 2.0, 0.0]
