"""torch.compile of programs that communicate."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from asyncpar.errors import PeerCancelled
from asyncpar.torch import DistributedDataParallel as Replicas
from tests.products import in_turn
from tests.torch.models import (
    WIDTH,
    assert_close,
    assert_parameters,
    assert_same_everywhere,
    make_model,
    rows,
    train,
)
from tests.torch.values import assert_same, draw, everyone, reduced
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process

BACKENDS = ("aot_eager", *(["inductor"] if os.environ.get("ASYNCPAR_TORCH_INDUCTOR") else []))
"""Inductor compiles C++, for half a minute: only where that is asked for."""


@on_ranks(2, limit=120)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_functions_communicate(backend: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        gathered = functional.all_gather_single(total + 1, 0, dist.group.WORLD)
        return functional.reduce_scatter_single(gathered, "sum", 0, dist.group.WORLD)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        got = compiled(draw(dist.get_rank()))
    assert_same(got, 2 * (2 * reduced("SUM", everyone()) + 1))


@on_ranks(2, limit=120)
def test_collectives_in_place_are_compiled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same(compiled(draw(dist.get_rank())), 2 * reduced("SUM", everyone()) + 1)


@on_ranks(2, limit=120)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_replicas_train_as_one_process(backend: str) -> None:
    model, expected = make_model(), make_model()
    train(torch.compile(DistributedDataParallel(model), backend=backend), rank=dist.get_rank())
    train(expected)
    assert_parameters(model, expected)


class Normed(nn.Module):
    """A network with buffers, of which a part can break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            raise ArithmeticError("it breaks")
        return self.last(torch.relu(self.norm(self.first(x))))


def _compiled_wrapper(model: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend=backend)


def _wrapper_in_a_compiled_function(model: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    return torch.compile(lambda x: model(x * 1.0) * 1.0, backend=backend)


def _compiled_module(model: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    model.module.compile(backend=backend)
    return model


COMPILED = {
    "wrapper": _compiled_wrapper,
    "wrapper in a function": _wrapper_in_a_compiled_function,
    "module": _compiled_module,
}


SETTINGS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@on_ranks(2, limit=120)
@pytest.mark.parametrize(("what", "settings"), in_turn(COMPILED, SETTINGS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_without_copies_are_compiled_and_train_as_those_of_torch(
    backend: str, what: str, settings: dict[str, Any]
) -> None:
    """The module is one graph: nothing of the wrapper is traced, in the first step and in those with other buckets."""
    torch.compiler.reset()
    counters.clear()
    models: list[Any] = []
    for kind in (Replicas, DistributedDataParallel):
        torch.manual_seed(3)
        models.append(kind(Normed(), bucket_cap_mb=0.0005, **settings))
    run = COMPILED[what](models[0], backend)
    for model, forward in ((models[0], run), (models[1], models[1])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(12):
            x, y = rows(step, dist.get_rank())
            optimizer.zero_grad()
            if step % 4 == 2:
                with model.no_sync():
                    nn.functional.mse_loss(forward(x), y).backward()
            nn.functional.mse_loss(forward(x), y).backward()
            optimizer.step()
    assert_parameters(models[0], models[1])
    graphs = 3 if what == "wrapper in a function" else 1
    assert counters["stats"]["unique_graphs"] == graphs, (counters["stats"], counters["graph_break"])


@on_ranks(2, limit=120)
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_of_a_module_of_torch_itself_are_compiled(backend: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = Replicas(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)))
    train(torch.compile(model, backend=backend), rank=dist.get_rank())
    assert counters["stats"]["unique_graphs"] == 1, counters
    assert_same_everywhere([each.grad for each in model.parameters()])


@on_ranks(2, limit=120)
def test_what_breaks_in_a_compiled_replica_ends_the_step_on_all_ranks_and_the_next_one_works() -> None:
    model = Replicas(Normed())
    compiled = torch.compile(model, backend="aot_eager")
    for breaks in (False, True, False):
        model.module.breaks = breaks and dist.get_rank() == 1
        x, y = rows(0, dist.get_rank())
        model.zero_grad()
        if breaks:
            with pytest.raises((ArithmeticError, PeerCancelled), match="it breaks"):
                nn.functional.mse_loss(compiled(x), y).backward()
        else:
            nn.functional.mse_loss(compiled(x), y).backward()
            assert_same_everywhere([each.grad for each in model.parameters()])


@on_ranks(2, limit=120)
def test_compiled_shards_train_as_one_process() -> None:
    model, expected = make_model(), make_model()
    for block in (model[0], model[1]):
        fully_shard(block)
    fully_shard(model)
    compiled: nn.Module = torch.compile(model, backend="aot_eager")
    train(compiled, rank=dist.get_rank())
    train(expected)
    assert_close([p.full_tensor() for p in model.parameters()], list(expected.parameters()))
