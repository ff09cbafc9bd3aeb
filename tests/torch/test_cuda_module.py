"""Stages of modules on devices do what torch does.  Here on CPU tensors: ``scripts/test-gpu`` has those of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncpar.errors import UsageError
from asyncpar.torch import CudaModuleStage

FEATURES = 6


def make_module() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, FEATURES)
    ).double()


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(7, FEATURES).double(), torch.randn(7, FEATURES).double()


def by_torch() -> tuple[torch.Tensor, Any, list[Any]]:
    module, (x, dy) = make_module(), drawn()
    x.requires_grad_()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad, [one.grad for one in module.parameters()]


@pytest.mark.parametrize("is_split", [False, True])
def test_passes_give_the_bits_of_torch_and_report_each_parameter_once(is_split: bool) -> None:
    stage, (x, dy) = CudaModuleStage("it", make_module()), drawn()
    reported: list[str] = []
    y, saved = stage.forward(x)
    assert not y.requires_grad
    if is_split:
        dx, deferred = stage.backward_input(saved, dy)
        assert all(one.tensor.grad is None for one in stage.parameters()), "that is the other half's"
        stage.backward_weight(deferred, reported.append)
    else:
        dx = stage.backward(saved, dy, reported.append)
    want_y, want_dx, wanted = by_torch()
    for found, want in ((y, want_y), (dx, want_dx), *zip((p.grad for p in stage.parameters()), wanted, strict=True)):
        assert torch.equal(found, want)
    assert sorted(reported) == sorted(one.name for one in stage.parameters())
    assert reported[0] in ("it.3.weight", "it.3.bias"), "the last layer is final first"


def test_parameters_and_buffers_are_those_of_the_module() -> None:
    module = make_module()
    stage = CudaModuleStage("it", module)
    assert [one.name for one in stage.parameters()] == [f"it.{name}" for name, _ in module.named_parameters()]
    assert [one.name for one in stage.buffers()] == [f"it.{name}" for name, _ in module.named_buffers()]
    stage.parameters()[0].value.fill_(3.0)
    assert bool((next(module.parameters()) == 3.0).all())
    stage.parameters()[0].grad.fill_(2.0)
    stage.zero_grad()
    assert bool((stage.parameters()[0].grad == 0.0).all())
    stage.set_training(False)
    assert not module.training
    assert (stage.stream, stage.empty((2, 3), "bfloat16").shape) == (1, (2, 3))


def test_token_numbers_have_no_gradient_and_parameters_out_of_reach_are_reported() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.spare = torch.nn.Embedding(5, 3), torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.table(x)
            return found

    stage, reported = CudaModuleStage("", Table()), list[str]()
    y, saved = stage.forward(torch.tensor([1, 4]))
    assert stage.backward(saved, torch.ones_like(y), reported.append) is None
    assert sorted(reported) == ["spare", "table.weight"]


def test_a_loss_stays_a_tensor_and_its_gradient_is_scaled() -> None:
    stage, (y, target) = CudaModuleStage("it", make_module()), drawn()
    value, dy = stage.loss(torch.nn.functional.mse_loss, scale=0.5)(y, target)
    torch.testing.assert_close(value, torch.nn.functional.mse_loss(y, target))
    torch.testing.assert_close(dy, 0.5 * 2.0 * (y - target) / y.numel())


class _Pair(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CudaModuleStage("it", "module"), "expected a torch.nn.Module, got str"),
        (lambda: CudaModuleStage("it", torch.nn.Tanh()), "expected all of it on one device, got it on none"),
        (lambda: CudaModuleStage("it", make_module()).forward([1.0]), "expected a tensor on cpu, got list"),
        (
            lambda: CudaModuleStage("it", make_module()).forward(torch.ones(2, device="meta")),
            "expected a tensor on cpu, got one on meta",
        ),
        (lambda: CudaModuleStage("it", _Pair(2, 2)).forward(torch.ones(2, 2)), "returns one tensor, got tuple"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
