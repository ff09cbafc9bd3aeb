"""FullyShardedDataParallel and fully_shard give what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from tests.torch.models import Block, assert_close, assert_parameters, make_model, rows, train
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process


def sharded(**settings: Any) -> nn.Module:
    """Return a model with each block and the rest sharded."""
    model = make_model()
    for block in (model[0], model[1]):
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters in full; all ranks must call."""
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_fully_shard_trains_as_one_process(reshards: bool) -> None:
    model, expected = sharded(reshard_after_forward=reshards), make_model()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    train(model, rank=dist.get_rank(), optimizer=torch.optim.AdamW)
    train(expected, optimizer=torch.optim.AdamW)
    assert_close(whole(model), list(expected.parameters()), rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_hybrid_sharding_trains_as_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, expected = sharded(mesh=mesh), make_model()
    train(model, rank=dist.get_rank())
    train(expected)
    assert_close(whole(model), list(expected.parameters()))


@on_ranks(4)
def test_uneven_parameters_are_sharded_over_four_ranks() -> None:
    torch.manual_seed(3)
    model, expected = nn.Linear(8, 3), nn.Linear(8, 3)
    expected.load_state_dict(model.state_dict())
    fully_shard(model)
    train(model, rank=dist.get_rank())
    train(expected)
    assert_close(whole(model), list(expected.parameters()))


@on_ranks(2)
def test_gradients_accumulate_without_reduction_when_told() -> None:
    model, expected = sharded(), make_model()
    assert isinstance(model, FSDPModule)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(rows(step, dist.get_rank())[0]).sum().backward()
        (expected(rows(step)[0]).sum() / 2).backward()
    got = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert_close(got, [parameter.grad for parameter in expected.parameters()])


@on_ranks(2)
def test_gradients_are_clipped_by_the_norm_of_the_whole() -> None:
    model, expected = sharded(), make_model()
    model(rows(0, dist.get_rank())[0]).square().sum().backward()
    (expected(rows(0)[0]).square().sum() / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(expected.parameters(), 0.1))


@on_ranks(2)
def test_mixed_precision_keeps_shards_in_full() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, expected = sharded(mp_policy=policy), make_model()
    model(rows(0, dist.get_rank())[0]).float().square().mean().backward()
    expected(rows(0)[0]).square().mean().backward()
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert got.grad.dtype == torch.float32
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0.1, atol=0.05)


@on_ranks(2)
def test_sharded_models_give_and_take_whole_states() -> None:
    model, expected = sharded(), make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(rows(0, dist.get_rank())[0]).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        expected.load_state_dict(state)
        assert len(moments["state"]) == len(list(expected.parameters()))
    again = sharded()
    set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_close(whole(again), whole(model), rtol=0, atol=0)


def trained_under_wrapper(strategy: ShardingStrategy, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model under FullyShardedDataParallel and one of this process alone, both trained."""
    model = FullyShardedDataParallel(
        make_model(), sharding_strategy=strategy, device_id=torch.device("cpu"), **settings
    )
    expected = make_model()
    train(model, rank=dist.get_rank())
    train(expected)
    return model, expected


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("original", [True, False])
def test_fully_sharded_data_parallel_trains_as_one_process(strategy: str, original: bool) -> None:
    policy = ModuleWrapPolicy({Block})
    model, expected = trained_under_wrapper(
        ShardingStrategy[strategy], auto_wrap_policy=policy, use_orig_params=original
    )
    with FullyShardedDataParallel.summon_full_params(model):
        got = [parameter.detach().clone().reshape(-1) for parameter in model.parameters()]
    assert_close([torch.cat(got)], [torch.cat([p.reshape(-1) for p in expected.parameters()])])


@on_ranks(2)
def test_fully_sharded_data_parallel_gives_whole_states() -> None:
    model = FullyShardedDataParallel(make_model(), use_orig_params=True, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    expected = make_model()
    expected.load_state_dict(state)
    assert_parameters(expected, make_model(), rtol=0, atol=0)


@on_ranks(4)
def test_fully_sharded_data_parallel_has_hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, expected = trained_under_wrapper(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        assert_parameters(model, expected)
