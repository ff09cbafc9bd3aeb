"""The linear algebra of PowerSGD."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from asyncpar.codecs import Values
from asyncpar.codecs.low_rank import expand, orthonormalize, subtract_product


def draw(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rows_are_made_orthonormal_even_if_they_nearly_depend() -> None:
    rows = draw(5, 1000)
    rows[3] = rows[0] + 1e-4 * rows[3]
    done = orthonormalize(rows).astype(np.float64)
    np.testing.assert_allclose(done @ done.T, np.eye(5), atol=1e-6)
    np.testing.assert_allclose(rows @ done.T @ done, rows, atol=1e-3)


def test_rows_that_depend_become_zeros_or_give_way_to_spare_ones() -> None:
    rows = draw(3, 50)
    rows[1] = -2.0 * rows[0]
    rows[2] = 0.0
    done = orthonormalize(rows)
    np.testing.assert_array_equal(done[1:], 0.0)
    filled = orthonormalize(rows, spare=draw(3, 50, seed=9)).astype(np.float64)
    np.testing.assert_allclose(filled @ filled.T, np.eye(3), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (300, 500), (3, 200_000)])
@pytest.mark.parametrize("rank", [1, 3])
def test_products_of_factors_are_those_of_matrices(shape: tuple[int, int], rank: int) -> None:
    left, right = draw(rank, shape[0]), draw(rank, shape[1], seed=1)
    expected = left.T.astype(np.float64) @ right
    out = np.empty(shape, np.float32)
    expand(left, right, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    values = draw(prod(shape), seed=2).reshape(shape)
    subtract_product(left, right, values, out=out)
    np.testing.assert_allclose(out, values - expected, rtol=1e-5, atol=1e-5)
