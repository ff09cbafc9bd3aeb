"""Stages of torch modules refuse what they cannot do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncpar.errors import UsageError
from asyncpar.torch.stage.stage import ModuleStage, torch_loss
from tests.torch.stage_passes import X
from tests.torch.torch_models import FEATURES

pytestmark = pytest.mark.usefixtures("one_thread")


# -- bad input ---------------------------------------------------------------------------------------------------------


class Calls(torch.nn.Module):
    """A module that does what it is given, between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, FEATURES).double()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def exponential_changed_in_place(self: Calls, x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(self.linear(x))
    y.mul_(2)
    return y


def test_a_module_that_spoils_what_backward_needs_is_found() -> None:
    stage = ModuleStage("it", Calls(exponential_changed_in_place))
    y, saved = stage.forward(X)
    with pytest.raises(UsageError, match="it: expected what backward needs to stay as it was"):
        stage.backward(saved, y)


def test_a_parameter_changed_by_torch_before_backward_is_found() -> None:
    module = torch.nn.Linear(FEATURES, FEATURES).double()
    stage = ModuleStage("it", module)
    y, saved = stage.forward(X)
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(UsageError, match="changed in place"):
        stage.backward(saved, y)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda self, x: (self.linear(x), x), UsageError, "it: expected a module that returns one tensor, got tuple"),
        (lambda self, x: None, UsageError, "it: expected a module that returns one tensor, got NoneType"),
        (lambda self, x: self.linear(x).to("meta"), UsageError, "output of it"),
        (lambda self, x: self.linear(x).to_sparse(), UsageError, "output of it"),
    ],
)
def test_outputs_other_than_one_tensor_are_refused(function: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ModuleStage("it", Calls(function)).forward(X)


def test_an_input_that_would_be_changed_is_refused() -> None:
    x = X.copy()
    with pytest.raises((UsageError, RuntimeError), match=r"in-?place|leaves its input"):
        ModuleStage("it", Calls(lambda self, x: self.linear(x.mul_(2)))).forward(x)
    np.testing.assert_array_equal(x, X)
    with pytest.raises(UsageError, match="leaves its input as it is"):
        ModuleStage("it", Calls(lambda self, x: self.linear(x.add_(1).double()))).forward(np.ones((2, 8), np.int64))


def test_a_saved_value_serves_one_backward_pass() -> None:
    stage = ModuleStage("it", torch.nn.Linear(FEATURES, FEATURES).double())
    y, saved = stage.forward(X)
    stage.backward(saved, y)
    with pytest.raises(RuntimeError, match="second time"):
        stage.backward(saved, y)


def test_an_output_gradient_of_another_shape_is_refused() -> None:
    stage = ModuleStage("it", torch.nn.Identity())
    _, saved = stage.forward(X)
    with pytest.raises(UsageError, match=r"expected an output gradient of shape \(2, 5, 8\), got \(3,\)"):
        stage.backward(saved, np.ones(3))


def test_what_a_stage_is_made_of_is_looked_at() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"module: expected a torch.nn.Module, got int"):
        ModuleStage("it", 3)
    with pytest.raises(UsageError, match="seed: expected 0 or more, or None, got -1"):
        ModuleStage("it", linear, seed=-1)
    with pytest.raises(UsageError, match=r"it.weight: expected a tensor in the CPU's memory, got one on meta"):
        ModuleStage("it", torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"parameter it.weight: expected one of .*, got torch.complex64"):
        ModuleStage("it", torch.nn.Linear(2, 2, dtype=torch.complex64))


def test_a_module_whose_parameters_are_not_those_any_more_is_refused() -> None:
    module = torch.nn.Linear(FEATURES, FEATURES).double()
    stage = ModuleStage("it", module)
    module.weight.requires_grad_(False)
    with pytest.raises(UsageError, match="expected requires_grad of 'weight' to stay True"):
        stage.forward(X)
    module.weight = torch.nn.Parameter(torch.zeros(FEATURES, FEATURES, dtype=torch.float64))
    with pytest.raises(UsageError, match="'weight' is another tensor now; make a new stage"):
        stage.forward(X)
    changed = torch.nn.Linear(FEATURES, FEATURES)
    stage = ModuleStage("it", changed)
    changed.double()
    with pytest.raises(UsageError, match=r"parameter it.weight: expected a C-contiguous value of float32"):
        stage.forward(X)


def test_arrays_of_dtypes_that_torch_lacks_are_refused() -> None:
    stage = ModuleStage("it", torch.nn.Identity())
    with pytest.raises(UsageError, match="input of it: expected a dtype that torch has, got <U1"):
        stage.forward(np.array(["a"]))


def test_a_loss_is_one_number_and_has_no_parameters() -> None:
    y = np.ones((2, 3))
    with pytest.raises(UsageError, match=r"function: expected one number as loss, got shape \(2, 3\)"):
        torch_loss(lambda y, target: y - target)(y, y)
    with pytest.raises(UsageError, match="function: expected one number as loss, got float"):
        torch_loss(lambda y, target: 1.0)(y, y)
    with pytest.raises(UsageError, match="function: expected a loss without parameters"):
        torch_loss(torch.nn.Linear(2, 2))


def test_the_scale_of_a_loss_is_that_of_its_gradient() -> None:
    y, target = np.array([1.0, 4.0]), np.array([0.0, 0.0])
    value, gradient = torch_loss(torch.nn.MSELoss(reduction="sum"), scale=0.5)(y, target)
    assert value == 17.0
    np.testing.assert_array_equal(gradient, [1.0, 4.0])
