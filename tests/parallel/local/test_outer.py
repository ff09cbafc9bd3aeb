"""The outer optimizer moves the common point as in the papers, or changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn import Parameter
from asyncpar.parallel.local import OuterConfig, OuterOptimizer

LOCAL_SGD = OuterConfig(learning_rate=1.0, momentum=0.0)


def make(value: float = 3.0, config: OuterConfig = LOCAL_SGD) -> tuple[Parameter, OuterOptimizer]:
    parameter = Parameter("w", np.full((2, 2), value))
    return parameter, OuterOptimizer([parameter], config)


def make_round(optimizer: OuterOptimizer, parameter: Parameter, *, moved: float, mean: float) -> None:
    """Let a rank move its parameter by ``moved``, and the ranks' mean of differences be ``mean``."""
    parameter.value += moved
    optimizer.measure()
    np.testing.assert_allclose(optimizer.differences[0].grad, -moved)
    optimizer.differences[0].grad[...] = mean
    optimizer.advance()


def test_with_rate_one_and_no_momentum_all_go_to_the_mean() -> None:
    parameter, optimizer = make(3.0)
    make_round(optimizer, parameter, moved=0.5, mean=-0.25)
    np.testing.assert_array_equal(parameter.value, 3.25)
    make_round(optimizer, parameter, moved=1.0, mean=-2.0)
    np.testing.assert_array_equal(parameter.value, 5.25)


def test_momentum_is_that_of_nesterov() -> None:
    parameter, optimizer = make(1.0, OuterConfig(learning_rate=0.7, momentum=0.9))
    make_round(optimizer, parameter, moved=-0.1, mean=0.1)
    first = 1.0 - 0.7 * (0.1 + 0.9 * 0.1)
    np.testing.assert_allclose(parameter.value, first, rtol=1e-15)
    make_round(optimizer, parameter, moved=0.0, mean=0.2)
    np.testing.assert_allclose(parameter.value, first - 0.7 * (0.2 + 0.9 * (0.9 * 0.1 + 0.2)), rtol=1e-15)


def test_scalars_and_single_precision_stay_what_they_are() -> None:
    parameter = Parameter("scale", np.array(2.0, np.float32))
    optimizer = OuterOptimizer([parameter], OuterConfig())
    make_round(optimizer, parameter, moved=-0.5, mean=0.5)
    assert parameter.value.dtype == np.float32
    assert parameter.value.shape == ()
    assert float(parameter.value) == pytest.approx(2.0 - 0.7 * 0.95)


def test_a_step_to_infinity_changes_nothing() -> None:
    parameter, optimizer = make(3.0)
    before = optimizer.state()
    parameter.value += 1.0
    optimizer.measure()
    optimizer.differences[0].grad[0, 0] = -np.inf
    with pytest.raises(NonFiniteValue, match="outer step: expected finite parameters, got NaN or infinity in w"):
        optimizer.advance()
    np.testing.assert_array_equal(parameter.value, 4.0)
    np.testing.assert_array_equal(optimizer.state().common["w"], before.common["w"])
    np.testing.assert_array_equal(optimizer.state().momentum["w"], before.momentum["w"])


def test_resetting_takes_parameters_back_to_the_common_point() -> None:
    parameter, optimizer = make(3.0)
    parameter.value += 1.0
    optimizer.reset()
    np.testing.assert_array_equal(parameter.value, 3.0)


def test_a_restored_optimizer_goes_on_identically() -> None:
    config = OuterConfig()
    parameter, optimizer = make(1.0, config)
    make_round(optimizer, parameter, moved=-0.1, mean=0.1)
    other, restored = make(0.0, config)
    other.value[...] = parameter.value
    restored.restore(optimizer.state())
    for one, values in ((optimizer, parameter), (restored, other)):
        make_round(one, values, moved=-0.3, mean=0.2)
    np.testing.assert_array_equal(parameter.value, other.value)


def test_states_are_copies() -> None:
    parameter, optimizer = make(1.0)
    state = optimizer.state()
    make_round(optimizer, parameter, moved=-0.1, mean=0.1)
    np.testing.assert_array_equal(state.common["w"], 1.0)


def test_states_of_other_parameters_are_refused() -> None:
    _, optimizer = make()
    state = optimizer.state()
    with pytest.raises(UsageError, match="expected common of the same parameters, but these differ: v, w"):
        optimizer.restore(replace(state, common={"v": np.zeros((2, 2))}))
    with pytest.raises(UsageError, match=r"expected momentum of w as float64\[2, 2\], got float32\[2, 2\]"):
        optimizer.restore(replace(state, momentum={"w": np.zeros((2, 2), np.float32)}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "outer_learning_rate: expected a positive number, got 0.0"),
        ({"learning_rate": float("inf")}, "outer_learning_rate: expected a positive number, got inf"),
        ({"momentum": 1.0}, "outer_momentum: expected 0 <= outer_momentum < 1, got 1.0"),
        ({"momentum": -0.1}, "outer_momentum: expected"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OuterConfig(**settings)


def test_parameters_that_cannot_be_told_apart_or_averaged_are_refused() -> None:
    one, _ = make()
    with pytest.raises(UsageError, match="two are named 'w'"):
        OuterOptimizer([one, one], LOCAL_SGD)
    with pytest.raises(UsageError, match="expected at least one parameter, got none"):
        OuterOptimizer([], LOCAL_SGD)
