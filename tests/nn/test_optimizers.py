"""Update rules against plain float64 transcriptions, in slices, and over whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
    Rule,
    all_finite,
    clip_factor,
    combined,
    distinct,
    squared_norm,
)
from asyncpar.nn.optimizers.rule import BLOCK, apply, new_states

RULES = [
    SGD(),
    SGD(weight_decay=0.1),
    SGD(momentum=0.9),
    SGD(momentum=0.8, nesterov=True, weight_decay=0.01),
    Adam(weight_decay=0.1),
    AdamW(beta1=0.8, beta2=0.9, weight_decay=0.1),
]

Reference = Callable[[Array, Array, dict[str, Array], int], Array]
RATE = 0.05


def sgd(value: Array, gradient: Array, state: dict[str, Array], step: int) -> Array:
    return value - RATE * (gradient + 0.1 * value)


def nesterov(value: Array, gradient: Array, state: dict[str, Array], step: int) -> Array:
    gradient = gradient + 0.01 * value
    state["m"] = 0.8 * state.get("m", np.zeros_like(value)) + gradient
    return np.asarray(value - RATE * (gradient + 0.8 * state["m"]))


def momentum(value: Array, gradient: Array, state: dict[str, Array], step: int) -> Array:
    state["m"] = 0.9 * state.get("m", np.zeros_like(value)) + gradient
    return np.asarray(value - RATE * state["m"])


def adam(value: Array, gradient: Array, state: dict[str, Array], step: int) -> Array:
    gradient = gradient + 0.1 * value
    state["m"] = 0.9 * state.get("m", np.zeros_like(value)) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", np.zeros_like(value)) + 0.001 * gradient**2
    m, v = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)
    return np.asarray(value - RATE * m / (np.sqrt(v) + 1e-8))


def adamw(value: Array, gradient: Array, state: dict[str, Array], step: int) -> Array:
    state["m"] = 0.8 * state.get("m", np.zeros_like(value)) + 0.2 * gradient
    state["v"] = 0.9 * state.get("v", np.zeros_like(value)) + 0.1 * gradient**2
    m, v = state["m"] / (1 - 0.8**step), state["v"] / (1 - 0.9**step)
    return np.asarray(value - RATE * (m / (np.sqrt(v) + 1e-8) + 0.1 * value))


def make_parameters(dtype: str = "float64") -> list[Parameter]:
    rng = np.random.default_rng(3)
    shapes = {"matrix": (4, 3), "vector": (5,), "scalar": (), "nothing": (0, 2)}
    return [Parameter(name, np.asarray(rng.normal(size=shape)).astype(dtype)) for name, shape in shapes.items()]


def give_gradients(parameters: list[Parameter], step: int) -> None:
    rng = np.random.default_rng(step)
    for parameter in parameters:
        parameter.grad = np.asarray(rng.normal(size=parameter.shape)).astype(parameter.dtype)


@pytest.mark.parametrize(
    ("rule", "reference"),
    [(RULES[1], sgd), (RULES[2], momentum), (RULES[3], nesterov), (RULES[4], adam), (RULES[5], adamw)],
    ids=["sgd", "momentum", "nesterov", "adam", "adamw"],
)
def test_updates_are_those_of_the_papers(rule: Rule, reference: Reference) -> None:
    value = np.random.default_rng(0).normal(size=6)
    expected: Array = value.copy()
    states, kept = new_states(rule, 6, value.dtype), dict[str, Array]()
    for step in range(1, 6):
        gradient = np.random.default_rng(step).normal(size=6)
        rule.update(value, gradient, states, step=step, learning_rate=RATE, decays=True)
        expected = reference(expected, gradient, kept, step)
        np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_slices_come_to_the_bits_of_the_whole(rule: Rule) -> None:
    rng = np.random.default_rng(1)
    count = BLOCK + 1001
    value = rng.normal(size=count).astype(np.float32)
    parts = [slice(0, 7), slice(7, 1000), slice(1000, BLOCK + 3), slice(BLOCK + 3, None)]
    cut = value.copy()
    states, cut_states = (new_states(rule, count, value.dtype) for _ in range(2))
    for step in (1, 2, 3):
        gradient = rng.normal(size=count).astype(np.float32)
        apply(rule, value, gradient, states, step=step, learning_rate=0.1, decays=True, factor=0.3)
        for part in parts:
            held = {name: state[part] for name, state in cut_states.items()}
            apply(rule, cut[part], gradient[part], held, step=step, learning_rate=0.1, decays=True, factor=0.3)
    assert cut.tobytes() == value.tobytes()
    assert [state.tobytes() for state in cut_states.values()] == [state.tobytes() for state in states.values()]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_leaves_the_gradient_alone(rule: Rule) -> None:
    value, gradient = np.ones(4), np.arange(4.0)
    states = new_states(rule, 4, value.dtype)
    rule.update(value, gradient, states, step=1, learning_rate=0.1, decays=True)
    assert gradient.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("rule", [SGD(weight_decay=0.5), Adam(weight_decay=0.5), AdamW(weight_decay=0.5)], ids=repr)
def test_only_matrices_decay(rule: Rule) -> None:
    parameters = make_parameters()
    before = {parameter.name: parameter.value.copy() for parameter in parameters}
    Optimizer(parameters, rule).step(0.1)
    assert not np.array_equal(parameters[0].value, before["matrix"])
    for parameter in parameters[1:]:
        np.testing.assert_array_equal(parameter.value, before[parameter.name])


def test_scaling_is_what_gradients_are_multiplied_with() -> None:
    scaled, plain = make_parameters(), make_parameters()
    for parameters in (scaled, plain):
        give_gradients(parameters, 1)
    optimizer = Optimizer(scaled, SGD())
    optimizer.scale(0.5)
    optimizer.scale(0.25)
    for parameter in plain:
        parameter.grad *= 0.125
    assert optimizer.squared_norm() == pytest.approx(Optimizer(plain, SGD()).squared_norm(), rel=1e-15)
    optimizer.step(0.1)
    Optimizer(plain, SGD()).step(0.1)
    assert [each.value.tobytes() for each in scaled] == [each.value.tobytes() for each in plain]
    assert optimizer.factor == 1.0


def test_states_are_found_by_name_and_can_be_restored() -> None:
    first, second = make_parameters(), make_parameters()
    one, other = (Optimizer(parameters, Adam()) for parameters in (first, second))
    give_gradients(first, 1)
    one.step(0.1)
    for parameter, copy in zip(first, second, strict=True):
        copy.value[...] = parameter.value
        for kind, array in one.state(parameter.name).items():
            other.state(parameter.name)[kind][...] = array
    other.step_count = one.step_count
    for parameters, optimizer in ((first, one), (second, other)):
        give_gradients(parameters, 2)
        optimizer.step(0.1)
    assert list(one.state("matrix")) == ["first", "second"]
    assert one.state("matrix")["first"].shape == (4, 3)
    assert [each.value.tobytes() for each in first] == [each.value.tobytes() for each in second]
    with pytest.raises(UsageError, match="name: expected a parameter of this optimizer, got 'other'"):
        one.state("other")


@pytest.mark.parametrize(("rule", "expected"), [(SGD(), 0), (SGD(momentum=0.9), 8), (Adam(), 16), (AdamW(), 16)])
def test_states_take_the_bytes_that_the_rule_needs(rule: Rule, expected: int) -> None:
    parameters = make_parameters()
    assert Optimizer(parameters, rule).nbytes == expected * sum(parameter.size for parameter in parameters)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(bad: float) -> None:
    parameters = make_parameters()
    before = [parameter.value.copy() for parameter in parameters]
    parameters[1].grad[2] = bad
    optimizer = Optimizer(parameters, Adam())
    assert not optimizer.is_finite()
    with pytest.raises(NonFiniteValue, match="expected finite numbers at step 0"):
        optimizer.step(0.1)
    for parameter, value in zip(parameters, before, strict=True):
        np.testing.assert_array_equal(parameter.value, value)
    assert optimizer.step_count == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_is_that_of_all_gradients_but_those_left_out(dtype: str) -> None:
    parameters = make_parameters(dtype)
    give_gradients(parameters, 1)
    optimizer = Optimizer(parameters, SGD())
    flat = np.concatenate([parameter.grad.reshape(-1) for parameter in parameters if parameter.name != "vector"])
    expected = float(np.square(flat.astype(np.float64)).sum())
    assert optimizer.squared_norm(without={"vector"}) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 20])
def test_the_norm_in_parts_is_the_sum_of_what_owners_find(parts: int) -> None:
    parameters = make_parameters("float32")
    give_gradients(parameters, 1)
    owners = []
    for owner in range(parts):
        sums = []
        for parameter in parameters:
            step = -(-parameter.size // parts)
            sums.append(squared_norm(parameter.grad.reshape(-1)[owner * step : (owner + 1) * step]))
        owners.append(combined(sums))
    assert Optimizer(parameters, SGD()).squared_norm(parts=parts) == combined(reversed(owners))


def test_sums_do_not_depend_on_order() -> None:
    sums = [1e16, 1.0, -1e16, 1e-3, 7.0]
    assert len({combined(sums[at:] + sums[:at]) for at in range(5)}) == 1
    assert combined([1e308, 1e308]) == math.inf
    assert math.isnan(combined([math.nan, 1.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_shows_what_is_not_finite(bad: float) -> None:
    values = np.zeros(70_000, np.float32)
    assert all_finite(values)
    values[69_000] = bad
    assert not all_finite(values)
    assert not math.isfinite(squared_norm(values))


def test_large_gradients_of_single_precision_have_a_finite_norm() -> None:
    assert squared_norm(np.full(4, 3e38, np.float32)) == pytest.approx(4 * 9e76, rel=1e-6)


def test_clipping_reduces_a_norm_to_the_limit() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == 0.25
    with pytest.raises(UsageError, match="clip_norm: expected a positive number, got 0"):
        clip_factor(1.0, 0.0)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (SGD, {"momentum": 1.0}),
        (SGD, {"nesterov": True}),
        (SGD, {"weight_decay": -0.1}),
        (SGD, {"weight_decay": math.nan}),
        (Adam, {"beta1": -0.1}),
        (Adam, {"beta2": 1.0}),
        (AdamW, {"epsilon": 0.0}),
        (AdamW, {"weight_decay": -1.0}),
    ],
)
def test_wrong_settings_are_refused_by_name(make: Callable[..., Rule], setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))}: expected"):
        make(**setting)


def test_a_shared_parameter_counts_once() -> None:
    one, other = make_parameters()[:2]
    assert distinct([one, other, one]) == (one, other)
    with pytest.raises(UsageError, match="two are named 'matrix'"):
        distinct([one, Parameter("matrix", np.ones(2))])
    with pytest.raises(UsageError, match="expected at least one parameter"):
        distinct([])
