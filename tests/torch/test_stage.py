"""Modules of torch as stages: what torch's own autograd computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncpar.torch.stage.stage import ModuleStage, module_stages
from tests.torch.stage_passes import (
    Checkpointed,
    Convolution,
    Hooked,
    Several,
    Tied,
    Unused,
    X,
    check_passes,
    check_same,
    make_stages,
    passes,
    plain_passes,
    seeded,
    train,
)
from tests.torch.torch_models import FEATURES, Block, gradients_of, make_parts, make_tokens, train_alone

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_transformer_in_parts_has_the_bits_of_torch(is_split: bool, dtype: torch.dtype) -> None:
    inputs, targets = make_tokens(4)
    whole, parts = make_parts(4, dtype=dtype), make_parts(4, dtype=dtype)
    losses = train_alone(whole, inputs, targets)
    assert train(make_stages(parts), inputs, targets, is_split=is_split) == losses
    check_same(gradients_of(parts), gradients_of(whole))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", [Tied, Unused, Hooked, Checkpointed, Several, Convolution, Block, torch.nn.Identity])
def test_modules_of_all_kinds_have_the_bits_of_torch(kind: Any, is_split: bool) -> None:
    make = seeded(kind)
    if kind is torch.nn.Identity:
        y, dx, _ = passes(make(), is_split=is_split)
        assert torch.equal(y, torch.tensor(X))
        assert torch.equal(dx, plain_passes(make())[1])
    elif kind is Unused:
        y, dx, gradients = passes(make(), is_split=is_split)
        want_y, want_dx, wanted = plain_passes(make())
        assert torch.equal(y, want_y)
        assert torch.equal(dx, want_dx)
        check_same(gradients, wanted)
    else:
        check_passes(make, is_split=is_split)


@pytest.mark.parametrize("is_split", [False, True])
def test_an_output_that_does_not_depend_on_the_input_has_a_gradient_of_zeros(is_split: bool) -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.value * 2

    _, dx, gradients = passes(Constant().double(), is_split=is_split)
    assert torch.equal(dx, torch.zeros(X.shape, dtype=torch.float64))
    assert gradients["0.value"].abs().min() > 0.1


def test_whole_numbers_have_no_gradient_and_all_of_it_is_left_for_later() -> None:
    (part, *_) = make_parts(4)
    stage = ModuleStage("first", part)
    y, saved = stage.forward(np.array([[1, 2, 3]]))
    dx, deferred = stage.backward_input(saved, np.ones_like(y))
    assert dx is None
    assert not np.any(stage.parameters()[0].grad)
    stage.backward_weight(deferred)
    assert np.all(stage.parameters()[0].grad.sum(axis=0)[:3])


@pytest.mark.parametrize("way", [tuple, dict])
def test_the_first_stage_takes_several_inputs(way: Any) -> None:
    class Add(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(FEATURES, 2).double()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x * mask)
            return y

    stage = ModuleStage("it", Add())
    mask = X > 0
    y, saved = stage.forward((X, mask) if way is tuple else {"mask": mask, "x": X})
    assert stage.backward(saved, np.ones_like(y)) is None
    np.testing.assert_array_equal(stage.parameters()[0].grad[0], np.where(mask, X, 0).reshape(-1, FEATURES).sum(axis=0))


def test_grad_mode_of_the_thread_does_not_matter() -> None:
    make = seeded(Block)
    _, _, wanted = plain_passes(make())
    with torch.no_grad():
        check_same(passes(make(), is_split=False)[2], wanted)
    module = make()
    with torch.inference_mode():
        stage = ModuleStage("it", module)
        y, saved = stage.forward(X)
        dx, deferred = stage.backward_input(saved, y)
        stage.backward_weight(deferred)
    assert dx is not None
    assert np.any(dx)
    assert gradients_of([module]).keys() == wanted.keys()


# -- parameters --------------------------------------------------------------------------------------------------------


def test_a_tied_parameter_is_one() -> None:
    stage = ModuleStage("it", Tied().double())
    assert [one.name for one in stage.parameters()] == ["it.first.weight", "it.first.bias", "it.second.bias"]


@pytest.mark.parametrize("is_split", [False, True])
def test_frozen_parameters_are_left_alone(is_split: bool) -> None:
    def make() -> torch.nn.Module:
        module = seeded(Block)()
        module.qkv.requires_grad_(False)
        module.norm2.weight.requires_grad_(False)
        return module

    module = make()
    assert len(ModuleStage("it", module).parameters()) == len([*module.parameters()]) - 3
    check_passes(make, is_split=is_split)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_parameter_of_two_stages_is_one(is_split: bool) -> None:
    def make() -> dict[str, torch.nn.Module]:
        first, *others, last = make_parts(3)
        last.out.weight = first.tokens.weight
        return {"first": first, "middle": others[0], "last": last}

    inputs, targets = make_tokens(3)
    parts, whole = make(), make()
    stages = module_stages(parts)
    assert any(one is stages[0].parameters()[1] for one in stages[2].parameters())
    losses = train_alone([*whole.values()], inputs, targets)
    assert train(stages, inputs, targets, is_split=is_split, in_flight=1) == losses
    for name, gradient in gradients_of([*parts.values()]).items():
        torch.testing.assert_close(gradient, gradients_of([*whole.values()])[name], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", [Tied, Unused, Block])
def test_each_gradient_is_reported_once_when_it_is_final(kind: Any, is_split: bool) -> None:
    stage = ModuleStage("it", seeded(kind)())
    named = {one.name: one for one in stage.parameters()}
    seen: dict[str, Any] = {}

    def on_gradient(name: str) -> None:
        assert name not in seen
        seen[name] = named[name].grad.copy()

    y, saved = stage.forward(X)
    if is_split:
        _, deferred = stage.backward_input(saved, y)
        assert not seen
        stage.backward_weight(deferred, on_gradient)
    else:
        stage.backward(saved, y, on_gradient)
    assert seen.keys() == named.keys()
    for name, gradient in seen.items():
        np.testing.assert_array_equal(gradient, named[name].grad)


def test_gradients_are_reported_while_others_are_still_to_come() -> None:
    stage = ModuleStage("it", torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double())
    first = stage.parameters()[0]
    is_open_at: dict[str, bool] = {}

    def look(name: str) -> None:
        is_open_at[name] = not np.any(first.grad)

    y, saved = stage.forward(np.ones((2, 3)))
    stage.backward(saved, y, look)
    assert is_open_at["it.1.weight"]
    assert is_open_at["it.1.bias"]
    assert not is_open_at["it.0.weight"]


def test_an_error_of_a_listener_comes_through_and_the_next_pass_works() -> None:
    stage = ModuleStage("it", torch.nn.Linear(FEATURES, 2).double())

    def fail(name: str) -> None:
        raise ZeroDivisionError(name)

    y, saved = stage.forward(X)
    with pytest.raises(ZeroDivisionError):
        stage.backward(saved, y, fail)
    y, saved = stage.forward(X)
    reported: list[str] = []
    stage.backward(saved, y, reported.append)
    assert sorted(reported) == ["it.bias", "it.weight"]
