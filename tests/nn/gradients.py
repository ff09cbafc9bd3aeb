"""Checks of a stage's backward pass against central finite differences, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncpar.nn import Array, Initializer, Stage

STEP = 1e-5
TOLERANCE = 1e-6


def make_initializer(seed: int = 0) -> Initializer:
    """Return an initializer for double precision."""
    return Initializer.from_seed(seed, "float64")


def differentiate(function: Callable[[], float], array: Array) -> Array:
    """Return the gradient of ``function`` with respect to ``array``, which it reads."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + STEP
        above = function()
        array[index] = kept - STEP
        below = function()
        array[index] = kept
        gradient[index] = (above - below) / (2 * STEP)
    return gradient


def relative_error(got: Array, expected: Array) -> float:
    """Return the norm of the difference, divided by that of ``expected``."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def assert_gradients_match(stage: Stage[Any], x: Any) -> None:
    """Assert that all gradients of ``stage`` at ``x``, parameters' and input's, are those of finite differences.

    Parameters are moved away from their first values, many of which are zero or one.  ``backward`` is called twice, to
    show that gradients are accumulated.
    """
    rng = np.random.default_rng(1)
    for parameter in stage.parameters():
        parameter.value += rng.normal(0.0, 0.3, parameter.value.shape)
    y, _ = stage.forward(x)
    weights = rng.normal(size=y.shape)

    def loss() -> float:
        return float((stage.forward(x)[0] * weights).sum())

    stage.zero_grad()
    reported: list[str] = []
    for on_gradient in (None, reported.append):
        _, saved = stage.forward(x)
        dx = stage.backward(saved, weights.copy(), on_gradient)
    for parameter in stage.parameters():
        expected = 2.0 * differentiate(loss, parameter.value)
        assert relative_error(parameter.grad, expected) <= TOLERANCE, parameter.name
    assert sorted(reported) == sorted(parameter.name for parameter in stage.parameters())
    if dx is None:
        assert np.issubdtype(x.dtype, np.integer)
    else:
        assert relative_error(dx, differentiate(loss, x)) <= TOLERANCE
