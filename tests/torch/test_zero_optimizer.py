"""ZeroRedundancyOptimizer and other optimizers of torch that communicate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.torch.models import assert_parameters, assert_same_everywhere, make_model, rows, train
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
@pytest.mark.parametrize("in_buckets", [True, False])
def test_sharded_optimizer_states_train_as_one_process(in_buckets: bool) -> None:
    model, expected = make_model(), make_model()
    replicated = DistributedDataParallel(model)
    train(
        replicated,
        rank=dist.get_rank(),
        optimizer=ZeroRedundancyOptimizer,
        optimizer_class=torch.optim.Adam,
        parameters_as_bucket_view=in_buckets,
    )
    train(expected, optimizer=torch.optim.Adam)
    assert_parameters(model, expected, rtol=1e-4, atol=1e-5)
    assert_same_everywhere(list(model.parameters()))


@on_ranks(2)
def test_sharded_optimizer_states_are_consolidated() -> None:
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    model(rows(0, dist.get_rank())[0]).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@on_ranks(2)
def test_models_that_step_alone_are_averaged_now_and_then() -> None:
    model = make_model()
    averager = PeriodicModelAverager(period=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    for step in range(2):
        optimizer.zero_grad()
        x, y = rows(step, dist.get_rank())
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for step in (2,):
        model(rows(step, dist.get_rank())[0]).sum().backward()
    optimizer.step()
    assert_same_everywhere(list(model.parameters()))
