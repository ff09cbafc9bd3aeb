"""Device meshes, DTensor and tensor parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.torch.models import WIDTH, Block, assert_close, make_model, rows, train
from tests.torch.values import assert_same, draw, everyone
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process


@on_ranks(4)
def test_meshes_have_groups_along_each_dim() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = dist.get_rank()
    for name, other in (("dp", mine ^ 2), ("tp", mine ^ 1)):
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == sorted([mine, other])
        assert mesh[name].get_local_rank() == sorted([mine, other]).index(mine)
        x = torch.tensor(float(mine))
        dist.all_reduce(x, group=group)
        assert x.item() == mine + other
    whole = mesh["dp", "tp"]._flatten("all")  # noqa: SLF001  # torch: joins dimensions of a DeviceMesh; there is no public call
    assert whole.size() == 4
    x = torch.tensor(float(mine))
    dist.all_reduce(x, group=whole.get_group())
    assert x.item() == 6


@on_ranks(4)
def test_tensors_are_sharded_unevenly_and_gathered() -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = draw(9, shape=(6, 5))
    for dim, sizes in ((0, (2, 2, 2, 0)), (1, (2, 2, 1, 0))):
        tensor = distribute_tensor(whole, mesh, [Shard(dim)])
        assert tensor.to_local().shape[dim] == sizes[dist.get_rank()]
        assert_same(tensor.full_tensor(), whole)
        assert_same(tensor.redistribute(mesh, [Shard(1 - dim)]).full_tensor(), whole)
        assert_same(tensor.redistribute(mesh, [Replicate()]).to_local(), whole)


@on_ranks(4)
def test_partial_sums_are_reduced_or_scattered() -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensor = DTensor.from_local(draw(dist.get_rank(), shape=(8, 3)), mesh, [Partial()])
    expected = torch.stack(everyone(shape=(8, 3))).sum(0)
    assert_same(tensor.redistribute(mesh, [Replicate()]).to_local(), expected)
    mine = 2 * dist.get_rank()
    assert_same(tensor.redistribute(mesh, [Shard(0)]).to_local(), expected[mine : mine + 2])


@on_ranks(4)
def test_two_dims_of_a_mesh_shard_two_dims_of_a_tensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = draw(4, shape=(6, 4))
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert tensor.to_local().shape == (3, 2)
    assert_same((tensor + tensor).full_tensor(), whole + whole)
    assert_same((tensor @ tensor.t()).full_tensor(), whole @ whole.t())
    assert tensor.sum().full_tensor().item() == whole.sum().item()


@on_ranks(2)
def test_gradients_flow_through_redistribution() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).reshape(3, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]).requires_grad_()
    (tensor.redistribute(mesh, [Replicate()]) @ weight).square().sum().backward()
    local, ones = whole.clone().requires_grad_(), torch.ones(2, 2, requires_grad=True)
    (local @ ones).square().sum().backward()
    assert_close([tensor.grad.full_tensor(), weight.grad.full_tensor()], [local.grad, ones.grad])


@on_ranks(2)
def test_column_and_row_parallel_layers_train_as_one_process() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, expected = Block(), Block()
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected.load_state_dict(model.state_dict())
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, expected)]
    for step in range(3):
        x, _ = rows(step)
        for each, optimizer in zip((model, expected), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    got = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    assert_close(got, list(expected.parameters()), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_sequence_parallel_shards_activations() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    x = torch.randn(2, 6, WIDTH)
    expected = model(x)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    got = model(x.chunk(2, dim=1)[dist.get_rank()])
    assert got.to_local().shape == (2, 3, WIDTH)
    assert_close([got.full_tensor()], [expected])


@on_ranks(2)
def test_losses_are_computed_on_sharded_logits() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(2)
    logits, labels = torch.randn(5, 8), torch.randint(8, (5,))
    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    local = logits.clone().requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(sharded, labels)
        loss.backward()
    expected = nn.functional.cross_entropy(local, labels)
    expected.backward()
    assert_close([loss.full_tensor(), sharded.grad.full_tensor()], [expected, local.grad])


@on_ranks(2)
def test_module_inputs_are_redistributed() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layer = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(0)
    nn.init.ones_(layer.weight)
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    parallelize_module(layer, mesh, prepare)
    x = draw(dist.get_rank(), shape=(2, WIDTH))
    assert layer(x).shape == (4, WIDTH)


@on_ranks(2)
def test_distributed_modules_start_alike() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    layer = distribute_module(nn.Linear(4, 4), mesh)
    first = layer.weight.to_local().clone()
    dist.broadcast(first, 0)
    assert_same(layer.weight.to_local(), first)


@on_ranks(4)
def test_data_and_tensor_parallelism_train_as_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, expected = make_model(), make_model()
    for block in (model[0], model[1]):
        parallelize_module(block, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, rank=mesh["dp"].get_local_rank(), size=2, foreach=False)
    train(expected, size=2)
    assert_close([p.full_tensor() for p in model.parameters()], list(expected.parameters()), rtol=1e-4, atol=1e-5)
