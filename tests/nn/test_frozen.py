"""A frozen parameter is a constant to passes and optimizers, and goes on as torch's would."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Array, Parameter, Transformer, TransformerConfig
from asyncpar.nn.half import HalfParameter
from asyncpar.nn.optimizers import SGD, Adam, AdamW, EarlyStep, Optimizer, Rule
from asyncpar.nn.tensor import SingleRankGroup, build_stage

RATE = 0.05
STEPS = 8
RULES: dict[str, Rule] = {
    "sgd": SGD(momentum=0.9, weight_decay=0.1),
    "adam": Adam(weight_decay=0.1),
    "adamw": AdamW(weight_decay=0.1),
}


def is_trained(name: str, step: int) -> bool:
    """Whether a parameter has a gradient in a step: one from the third on, one not in the middle, one always."""
    return {"late": step >= 2, "paused": step not in (3, 4), "always": True}[name]


def draw(name: str, step: int = -1) -> Array:
    return np.asarray(np.random.default_rng([step + 1, *name.encode()]).normal(size=(3, 2)))


class Reference:
    """The optimizers of torch, by the formulas of its documentation: what has no gradient is passed over."""

    def __init__(self, rule: Any, value: Array) -> None:
        self.rule = rule
        self.value = value
        self.states = np.zeros((2, *value.shape))
        self.steps = 0

    def step(self, gradient: Array | None) -> None:
        rule = self.rule
        if gradient is None:
            return
        self.steps += 1
        if isinstance(rule, AdamW):
            self.value = self.value * (1.0 - RATE * rule.weight_decay)
        else:
            gradient = gradient + rule.weight_decay * self.value
        if isinstance(rule, SGD):
            self.states[0] = rule.momentum * self.states[0] + gradient
            self.value = self.value - RATE * self.states[0]
            return
        self.states[0] = rule.beta1 * self.states[0] + (1.0 - rule.beta1) * gradient
        self.states[1] = rule.beta2 * self.states[1] + (1.0 - rule.beta2) * gradient**2
        first = self.states[0] / (1.0 - rule.beta1**self.steps)
        second = self.states[1] / (1.0 - rule.beta2**self.steps)
        self.value = self.value - RATE * first / (np.sqrt(second) + rule.epsilon)


def train(rule: Rule, *, is_early: bool = False, restarts_at: int | None = None) -> dict[str, Array]:
    """Return the values after steps in which parameters were frozen by turns."""
    parameters = [Parameter(name, draw(name)) for name in ("late", "paused", "always")]
    optimizer = Optimizer(parameters, rule)
    for step in range(STEPS):
        if step == restarts_at:
            optimizer = restarted(optimizer)
        for parameter in parameters:
            parameter.requires_grad = is_trained(parameter.name, step)
            parameter.accumulate(draw(parameter.name, step))
        if is_early:
            early = EarlyStep(optimizer, RATE)
            for parameter in parameters:
                if parameter.requires_grad:
                    early.take(parameter.name, slice(0, 6), parameter.grad.reshape(-1))
            early.commit()
        else:
            optimizer.step(RATE)
        optimizer.zero_grad()
    return {parameter.name: parameter.value for parameter in parameters}


def restarted(optimizer: Optimizer) -> Optimizer:
    """Return another optimizer that goes on where ``optimizer`` is."""
    other = Optimizer(optimizer.parameters, optimizer.rule)
    other.step_count, other.skipped = optimizer.step_count, optimizer.skipped
    for parameter in optimizer.parameters:
        for kind, array in optimizer.state(parameter.name).items():
            other.state(parameter.name)[kind][...] = array
    return other


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_freezing_in_mid_run_is_what_torch_makes_of_parameters_without_gradient(rule: Rule) -> None:
    for name, value in train(rule).items():
        reference = Reference(rule, draw(name))
        for step in range(STEPS):
            reference.step(draw(name, step) if is_trained(name, step) else None)
        np.testing.assert_allclose(value, reference.value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("other", [{"is_early": True}, {"restarts_at": 4}], ids=["early", "restarted"])
def test_early_steps_and_restored_optimizers_come_to_the_same_bits(rule: Rule, other: dict[str, Any]) -> None:
    for name, value in train(rule).items():
        np.testing.assert_array_equal(train(rule, **other)[name], value, err_msg=name)


def test_norms_and_checks_leave_out_what_is_frozen() -> None:
    parameters = [Parameter(name, np.ones(2)) for name in ("a", "b")]
    optimizer = Optimizer(parameters, SGD())
    parameters[0].requires_grad = False
    parameters[0].grad[...] = math.inf
    parameters[1].accumulate(np.array([3.0, 4.0]))
    assert optimizer.clip(None) == 5.0
    optimizer.step(1.0)
    assert parameters[0].value.tolist() == [1.0, 1.0]
    assert parameters[1].value.tolist() == [-2.0, -3.0]
    assert optimizer.skipped == {"a": 1}


@pytest.mark.parametrize("kind", [Parameter, HalfParameter])
def test_a_frozen_parameter_gets_no_gradient(kind: type[Parameter]) -> None:
    parameter = kind("w", np.ones(4, np.float32))
    parameter.accumulate(np.ones(4, np.float32))
    parameter.requires_grad = False
    assert not parameter.has_grad
    parameter.accumulate(1.0)
    assert not parameter.has_grad
    parameter.requires_grad = True
    parameter.accumulate(np.full(4, 2.0, np.float32))
    assert parameter.grad.astype(np.float32).tolist() == [2.0] * 4


@pytest.mark.parametrize("value", [None, 0, 1, "no"])
def test_requires_grad_is_true_or_false(value: Any) -> None:
    parameter = Parameter("w", np.ones(2))
    with pytest.raises(UsageError, match=r"parameter w: expected True or False as requires_grad"):
        parameter.requires_grad = value
    assert parameter.requires_grad


TOKENS = np.random.default_rng(1).integers(0, 13, (2, 6))
CONFIG = TransformerConfig(vocabulary=13, length=6, features=8, layers=1, heads=2, dtype="float64")


def make_models() -> dict[str, Any]:
    """Return models of all layers with parameters, whole and as tensor-parallel ranks have them."""
    tied = replace(CONFIG, tied_embeddings=True)
    whole: dict[str, Any] = {"is_first": True, "is_last": True, "group": SingleRankGroup()}
    return {
        "whole": Transformer(CONFIG),
        "tied": Transformer(tied),
        "slices": build_stage(CONFIG, layers=range(1), **whole),
        "tied slices": build_stage(tied, layers=range(1), **whole),
    }


@pytest.mark.parametrize("model", ["whole", "tied", "slices", "tied slices"])
def test_passes_compute_gradients_of_what_is_not_frozen_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_models()[model]
    parameters = list({id(each): each for each in layers.parameters()}.values())
    computed: set[str] = set()
    monkeypatch.setattr(Parameter, "accumulate", lambda self, *_: computed.add(self.name))

    def passes() -> set[str]:
        computed.clear()
        outputs, saved = layers.forward(TOKENS)
        layers.backward(saved, np.ones_like(outputs))
        return set(computed)

    everything = passes()
    assert everything == {parameter.name for parameter in parameters}
    for parameter in parameters:
        parameter.requires_grad = False
        assert passes() == everything - {parameter.name}
        parameter.requires_grad = True
