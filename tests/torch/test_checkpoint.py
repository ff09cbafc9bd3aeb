"""Distributed checkpoints of torch."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.torch.models import assert_close, make_model, train
from tests.torch.values import assert_same, draw
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process


def common_directory() -> Path:
    """Return a new directory, the same on all ranks."""
    folders: list[Any] = [mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def sharded() -> nn.Module:
    model = make_model()
    for block in (model[0], model[1]):
        fully_shard(block)
    return fully_shard(model)


@on_ranks(2)
def test_sharded_models_and_optimizers_come_back() -> None:
    model, directory = sharded(), common_directory()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, rank=dist.get_rank())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    again = sharded()
    stepping = torch.optim.Adam(again.parameters(), lr=0.1)
    weights, moments = get_state_dict(again, stepping)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(again, stepping, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_close([p.to_local() for p in again.parameters()], [p.to_local() for p in model.parameters()], rtol=0, atol=0)
    for one, other in zip(stepping.state.values(), optimizer.state.values(), strict=True):
        assert_same(one["exp_avg"].to_local(), other["exp_avg"].to_local())


@on_ranks(4)
def test_checkpoints_are_loaded_in_another_layout() -> None:
    directory, whole = common_directory(), draw(5, shape=(10, 6))
    row, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    dcp.save({"x": distribute_tensor(whole, row, [Shard(0)])}, checkpoint_id=directory)
    for mesh, placements in ((row, [Shard(1)]), (square, [Shard(1), Shard(0)]), (square, [Replicate(), Shard(0)])):
        state = {"x": distribute_tensor(torch.zeros(10, 6), mesh, placements)}
        dcp.load(state, checkpoint_id=directory)
        assert_same(state["x"].full_tensor(), whole)


@on_ranks(2)
def test_saving_goes_on_in_the_background() -> None:
    directory = common_directory()
    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(draw(1, shape=(6, 4)), mesh, [Shard(0)]), "step": 3}
    control = dist.new_group()
    saving = dcp.async_save(state, checkpoint_id=directory, process_group=control)
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    saving.result(timeout=20)
    loaded: dict[str, Any] = {"x": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]), "step": 0}
    dcp.load(loaded, checkpoint_id=directory)
    assert_same(loaded["x"].full_tensor(), draw(1, shape=(6, 4)))
    assert loaded["step"] == 3


@on_ranks(2)
def test_errors_on_one_rank_reach_all() -> None:
    state = {"x": torch.zeros(2)}
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(state, checkpoint_id=common_directory() / "none")
