"""AdamW against a plain float64 transcription of the paper, clipping, and the schedule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn import Parameter, WarmupCosine
from asyncpar.nn.optimizers import AdamW, Optimizer


def make_parameter(name: str, *shape: int, seed: int = 0) -> Parameter:
    parameter = Parameter(name, np.random.default_rng(seed).normal(size=shape))
    parameter.grad[...] = np.random.default_rng(seed + 1).normal(size=shape)
    return parameter


def test_updates_are_those_of_the_paper() -> None:
    rule = AdamW(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.1)
    parameter = make_parameter("p", 3, 2)
    optimizer = Optimizer([parameter], rule)
    value = parameter.value.copy()
    m, v = np.zeros_like(value), np.zeros_like(value)
    for step in range(1, 6):
        gradient = np.random.default_rng(step).normal(size=(3, 2))
        parameter.grad[...] = gradient
        optimizer.step(0.05)
        m = 0.8 * m + 0.2 * gradient
        v = 0.9 * v + 0.1 * gradient**2
        corrected = (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-3)
        value = value - 0.05 * (corrected + 0.1 * value)
        np.testing.assert_allclose(parameter.value, value, rtol=1e-12)


def test_decay_leaves_vectors_alone() -> None:
    vector, matrix = make_parameter("v", 3), make_parameter("m", 3, 3)
    vector.zero_grad()
    matrix.zero_grad()
    before = vector.value.copy(), matrix.value.copy()
    Optimizer([vector, matrix], AdamW(weight_decay=0.5)).step(0.1)
    np.testing.assert_array_equal(vector.value, before[0])
    np.testing.assert_allclose(matrix.value, before[1] * 0.95, rtol=1e-14)


def make_holding(name: str, values: list[Any]) -> Parameter:
    parameter = Parameter(name, np.zeros(np.shape(values)))
    parameter.grad[...] = values
    return parameter


def test_the_norm_is_taken_over_all_parameters() -> None:
    held = [make_holding("a", [3.0, 0.0]), make_holding("b", [[4.0]]), make_holding("c", [12.0])]
    assert Optimizer(held, AdamW()).clip(None) == 13.0


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    plain, clipped = ([make_parameter("a", 4), make_parameter("b", 2, 2, seed=5)] for _ in range(2))
    norm = math.sqrt(sum(float(np.vdot(parameter.grad, parameter.grad)) for parameter in plain))
    for parameter in plain:
        parameter.grad *= 0.5 / norm
    Optimizer(plain, AdamW()).step(0.1)
    optimizer = Optimizer(clipped, AdamW())
    assert optimizer.clip(0.5) == pytest.approx(norm)
    optimizer.step(0.1)
    for one, other in zip(plain, clipped, strict=True):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-12)


def test_a_small_norm_is_not_clipped() -> None:
    plain, clipped = make_parameter("a", 4), make_parameter("a", 4)
    Optimizer([plain], AdamW()).step(0.1)
    optimizer = Optimizer([clipped], AdamW())
    optimizer.clip(1e6)
    optimizer.step(0.1)
    np.testing.assert_array_equal(plain.value, clipped.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(bad: float) -> None:
    good, spoiled = make_parameter("a", 4), make_parameter("b", 4)
    spoiled.grad[2] = bad
    before = good.value.copy()
    optimizer = Optimizer([good, spoiled], AdamW())
    with pytest.raises(NonFiniteValue, match="expected a finite global norm at step 0"):
        optimizer.clip(1.0)
    with pytest.raises(NonFiniteValue, match="expected finite numbers at step 0"):
        optimizer.step(0.1)
    np.testing.assert_array_equal(good.value, before)
    assert optimizer.step_count == 0


@pytest.mark.parametrize("setting", [{"beta1": 1.0}, {"beta2": -0.1}, {"epsilon": 0.0}, {"weight_decay": -1.0}])
def test_wrong_settings_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))}: expected"):
        AdamW(**setting)


def test_a_limit_of_the_norm_must_be_positive() -> None:
    with pytest.raises(UsageError, match="clip_norm: expected a positive number"):
        Optimizer([make_parameter("a", 4)], AdamW()).clip(0.0)


def test_an_optimizer_needs_parameters() -> None:
    with pytest.raises(UsageError, match="parameters: expected at least one"):
        Optimizer([], AdamW())


def test_the_schedule_rises_falls_and_stays() -> None:
    rate = WarmupCosine(peak=2.0, steps=110, warmup=10, floor=0.1)
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert rate(10) == pytest.approx(2.0)
    assert rate(60) == pytest.approx(2.0 * 0.55)
    assert rate(110) == rate(1000) == pytest.approx(0.2)


def test_a_schedule_of_warm_up_only_ends_at_its_peak() -> None:
    rate = WarmupCosine(peak=1.0, steps=4, warmup=4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("setting", "name"),
    [({"peak": 0.0, "steps": 1}, "peak"), ({"peak": 1.0, "steps": 2, "warmup": 3}, "warmup"),
     ({"peak": 1.0, "steps": 0}, "warmup"), ({"peak": 1.0, "steps": 1, "floor": 2.0}, "floor")],
)  # fmt: skip
def test_wrong_schedules_are_refused_by_name(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected"):
        WarmupCosine(**setting)
