"""Softmax cross-entropy: value, gradient, scale and shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import softmax_cross_entropy
from tests.nn.gradients import TOLERANCE, differentiate, relative_error

LOGITS = np.random.default_rng(3).normal(0.0, 2.0, (2, 3, 5))
TARGETS = np.array([[0, 4, 2], [1, 1, 3]])


def test_equal_logits_cost_the_logarithm_of_the_classes() -> None:
    loss, _ = softmax_cross_entropy(np.zeros((4, 8)), np.arange(4), scale=1.0)
    assert loss == pytest.approx(4 * math.log(8), rel=1e-14)


def test_the_gradient_is_that_of_finite_differences() -> None:
    logits = LOGITS.copy()
    _, gradient = softmax_cross_entropy(logits, TARGETS, scale=1.0)
    expected = differentiate(lambda: softmax_cross_entropy(logits, TARGETS, scale=1.0)[0], logits)
    assert relative_error(gradient, expected) <= TOLERANCE


def test_the_scale_applies_to_the_gradient_and_not_to_the_sum() -> None:
    loss, gradient = softmax_cross_entropy(LOGITS, TARGETS, scale=1.0)
    same, scaled = softmax_cross_entropy(LOGITS, TARGETS, scale=0.25)
    assert same == loss
    np.testing.assert_allclose(scaled, gradient / 4, rtol=1e-14)


def test_parts_add_up_to_the_whole() -> None:
    whole, gradient = softmax_cross_entropy(LOGITS, TARGETS, scale=0.5)
    parts = [softmax_cross_entropy(LOGITS[i : i + 1], TARGETS[i : i + 1], scale=0.5) for i in range(2)]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-14)
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), gradient)


def test_huge_logits_do_not_overflow() -> None:
    loss, gradient = softmax_cross_entropy(np.array([[1e4, 0.0]], np.float32), np.array([1]), scale=1.0)
    assert loss == pytest.approx(1e4)
    np.testing.assert_array_equal(gradient, [[1.0, -1.0]])


def test_logits_are_left_alone() -> None:
    logits = LOGITS.copy()
    softmax_cross_entropy(logits, TARGETS, scale=1.0)
    np.testing.assert_array_equal(logits, LOGITS)


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(UsageError, match=r"targets: expected shape \(2, 3\) to go with \(2, 3, 5\), got \(3, 2\)"):
        softmax_cross_entropy(LOGITS, TARGETS.T, scale=1.0)


@pytest.mark.parametrize("target", [-1, 5])
def test_targets_outside_of_the_classes_are_refused(target: int) -> None:
    with pytest.raises(UsageError, match=r"targets: expected 0\.\.4"):
        softmax_cross_entropy(LOGITS, np.full((2, 3), target), scale=1.0)
