"""Passes of stages of torch modules, plain ones to compare them with, and modules of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from asyncpar.torch.stage.stage import ModuleStage, torch_loss
from tests.pipeline.real_stages import pass_through
from tests.torch.torch_models import FEATURES, Block, cross_entropy, gradients_of

X = np.random.default_rng(3).normal(size=(2, 5, FEATURES))


def make_stages(parts: Sequence[torch.nn.Module], **options: Any) -> list[ModuleStage]:
    return [ModuleStage(str(place), part, **options) for place, part in enumerate(parts)]


def train(
    stages: Sequence[ModuleStage], inputs: Any, targets: Any, *, is_split: bool, in_flight: int = 2
) -> list[float]:
    """Train on all micro-batches, ``in_flight`` at a time; return the losses."""
    loss = torch_loss(cross_entropy)
    return pass_through(stages, inputs, targets, loss, in_flight=in_flight, is_split=is_split)


def passes(
    module: torch.nn.Module, *, is_split: bool, x: Any = X, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return what one pass of a stage comes to, with an output gradient that is nowhere alike."""
    stage = ModuleStage("it", module, **options)
    y, saved = stage.forward(x)
    dy = np.cos(np.arange(y.size, dtype=np.float64)).reshape(y.shape).astype(y.dtype)
    if is_split:
        dx, deferred = stage.backward_input(saved, dy)
        stage.backward_weight(deferred)
    else:
        dx = stage.backward(saved, dy)
    return torch.from_numpy(y.copy()), torch.tensor(dx), gradients_of([module])


def plain_passes(module: torch.nn.Module, x: Any = X) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Return what torch comes to."""
    leaf = torch.tensor(x, requires_grad=True)
    y = module(leaf)
    dy = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape)
    y.backward(dy.to(y.dtype))
    return y.detach(), leaf.grad, gradients_of([module])


def check_passes(make: Any, *, is_split: bool, **options: Any) -> None:
    y, dx, gradients = passes(make(), is_split=is_split, **options)
    want_y, want_dx, wanted = plain_passes(make())
    torch.testing.assert_close(y, want_y, rtol=0, atol=0)
    torch.testing.assert_close(dx, want_dx, rtol=0, atol=0)
    check_same(gradients, wanted)


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]), name
    assert any(gradient.abs().max() > 0 for gradient in found.values())


def seeded(make: Any) -> Any:
    """Return ``make``, whose modules are equal every time, of float64."""

    def made() -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return make().double()

    return made


class Tied(torch.nn.Module):
    """One weight, used three times, and a bias that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, FEATURES)
        self.second = torch.nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) @ self.first.weight


class Unused(torch.nn.Module):
    """A layer that does nothing, and one that is cut off from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(FEATURES, FEATURES)
        self.unused = torch.nn.Linear(3, 3)
        self.offset = torch.nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + torch.exp(self.offset) * 2


class Hooked(torch.nn.Module):
    """Gradients are changed on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.first(x)
        if middle.requires_grad:
            middle.register_hook(lambda gradient: gradient * 3)
        return self.second(middle)


class Checkpointed(torch.nn.Module):
    """A part is computed again by torch's own means."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self.block, x, use_reentrant=False))


class Several(torch.nn.Module):
    """Nodes with several outputs, views, saved outputs, and a weight that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(FEATURES, FEATURES))
        self.norm = torch.nn.GroupNorm(1, 5)
        self.scale = torch.nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.linear(x) * self.scale).chunk(2, dim=-1)
        softened = torch.softmax(first.transpose(1, 2), dim=-1) @ second.sigmoid()
        best, _ = softened.max(dim=-1, keepdim=True)
        return self.norm(x * 2) + best.mean(dim=1, keepdim=True).expand(x.shape)


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv1d(5, 6, 3, padding=1), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Conv1d(6, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y
