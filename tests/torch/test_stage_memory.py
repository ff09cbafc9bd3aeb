"""Stages of torch modules and their modules have one memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from asyncpar.nn.half import HalfParameter, stored_value
from asyncpar.nn.optimizers import SGD, Adam, Optimizer
from asyncpar.pipeline.offload.packing import bytes_of
from asyncpar.torch.stage.stage import ModuleStage
from tests.torch.stage_passes import Tied, Unused, X, make_stages, seeded, train
from tests.torch.torch_models import FEATURES, Block, make_parts, make_tokens, train_alone

pytestmark = pytest.mark.usefixtures("one_thread")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_values_and_gradients_are_the_memory_of_the_module() -> None:
    module = torch.nn.Linear(3, 2)
    stage = ModuleStage("layer", module)
    weight, bias = stage.parameters()
    assert (weight.name, bias.name) == ("layer.weight", "layer.bias")
    weight.value[0, 0] = 7.0
    assert module.weight[0, 0] == 7.0
    assert not weight.has_grad
    y, saved = stage.forward(np.ones((4, 3), np.float32))
    stage.backward(saved, np.ones_like(y))
    assert weight.grad is weight.grad
    weight.grad[...] += 1.0
    assert torch.equal(module.weight.grad, torch.full((2, 3), 5.0))
    stage.zero_grad()
    assert not module.weight.grad.any()


def test_what_torch_does_to_its_side_is_seen() -> None:
    module = torch.nn.Linear(3, 2)
    weight, _ = ModuleStage("layer", module).parameters()
    module.weight.grad = torch.ones(2, 3)
    assert np.all(weight.grad == 1.0)
    module.zero_grad()
    assert not weight.has_grad
    assert np.all(weight.grad == 0.0)
    module.weight.data = torch.full((2, 3), 9.0)
    assert np.all(weight.value == 9.0)
    weight.grad = np.full((2, 3), 4.0, np.float32)
    assert torch.equal(module.weight.grad, torch.full((2, 3), 4.0))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)])
def test_half_precision_is_stored_by_torch_and_stepped_with_masters(dtype: torch.dtype, expected: Any) -> None:
    module = torch.nn.Linear(4, 4).to(dtype)
    stage = ModuleStage("layer", module)
    weight = stage.parameters()[0]
    assert isinstance(weight, HalfParameter)
    assert stored_value(weight).dtype == expected
    assert weight.value.dtype == np.float32
    before = module.weight.detach().clone()
    optimizer = Optimizer(stage.parameters(), SGD())
    y, saved = stage.forward(np.ones((3, 4), expected))
    assert y.dtype == expected
    dx = stage.backward(saved, y)
    assert dx is not None
    assert dx.dtype == expected
    assert weight.grad.dtype == expected
    optimizer.step(0.5)
    moved = before.float() - 0.5 * module.weight.grad.float()
    assert torch.equal(module.weight, moved.to(dtype))
    assert not torch.equal(module.weight, before)


def test_our_optimizer_moves_a_module_as_that_of_torch_does() -> None:
    inputs, targets = make_tokens(2)
    whole, parts = make_parts(3), make_parts(3)
    stages = make_stages(parts)
    ours = Optimizer([one for stage in stages for one in stage.parameters()], Adam(beta2=0.99))
    theirs = torch.optim.Adam(torch.nn.Sequential(*whole).parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        train(stages, inputs, targets, is_split=True)
        train_alone(whole, inputs, targets)
        ours.step(0.01)
        theirs.step()
    for mine, other in zip(parts, whole, strict=True):
        for one, wanted in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-11)


def test_nothing_is_copied_between_arrays_and_tensors() -> None:
    seen: list[int] = []

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.data_ptr())
            return x

    y, _ = ModuleStage("it", Same()).forward(X)
    assert seen == [X.ctypes.data]
    assert y.ctypes.data == X.ctypes.data


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    stage = ModuleStage("it", torch.nn.Identity())
    frozen = X.copy()
    frozen.flags.writeable = False
    for x in (frozen, X[::-1], X.astype(">f8")):
        np.testing.assert_array_equal(stage.forward(x)[0], x)


def test_what_is_saved_is_counted_once_and_parameters_are_not() -> None:
    stage = ModuleStage("it", torch.nn.Linear(FEATURES, FEATURES).double())
    _, saved = stage.forward(X)
    assert bytes_of(saved) == X.nbytes
    whole = ModuleStage("block", seeded(Block)())
    _, saved = whole.forward(X)
    kept = bytes_of(saved)
    assert 5 * X.nbytes < kept < 20 * X.nbytes


def test_the_second_half_keeps_only_what_it_needs() -> None:
    class Wide(torch.nn.Module):
        """What the exponential keeps is needed by nothing but the input's gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(FEATURES, FEATURES).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = torch.exp(x * 0.1)
            y: torch.Tensor = self.linear(x)
            return y

    stage = ModuleStage("it", Wide())
    y, saved = stage.forward(X)
    assert bytes_of(saved) == 10 * X.nbytes
    _, deferred = stage.backward_input(saved, y)
    assert bytes_of(deferred) == 2 * X.nbytes  # the input of the layer, and the gradient of its output


def passes_with_released_values(kind: Any, *, releases: bool) -> dict[str, Any]:
    """Return the gradients, with values away or not in the second half of the backward pass."""
    stage = ModuleStage("it", seeded(kind)())
    y, saved = stage.forward(X)
    _, deferred = stage.backward_input(saved, np.cos(y))
    if releases:
        for parameter in stage.parameters():
            parameter.release_value()
    stage.backward_weight(deferred)
    return {parameter.name: parameter.grad for parameter in stage.parameters()}


@pytest.mark.parametrize("kind", [Block, Tied, Unused])
def test_the_second_half_does_not_need_the_values_of_layers(kind: Any) -> None:
    kept, released = (passes_with_released_values(kind, releases=releases) for releases in (False, True))
    for name, gradient in kept.items():
        np.testing.assert_array_equal(gradient, released[name], err_msg=name)


def test_a_gradient_that_needs_values_that_are_away_is_not_a_number() -> None:
    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.ones(FEATURES, FEATURES))
            self.second = torch.nn.Parameter(torch.ones(FEATURES, FEATURES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.first * self.second)

    gradients = passes_with_released_values(Product, releases=True)
    assert all(np.isnan(gradient).all() for gradient in gradients.values())
