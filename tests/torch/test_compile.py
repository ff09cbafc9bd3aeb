"""torch.compile of programs that communicate."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.torch.models import assert_close, assert_parameters, make_model, train
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
