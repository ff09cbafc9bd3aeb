"""FSDP2 whose buffers are in memory that ranks share trains as FSDP2 with buffers of its own, to the last bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncpar.errors import ArenaFull, UsageError
from asyncpar.torch import ProcessGroup
from asyncpar.torch.shared_tensors import SharedTensors
from tests.torch.models import make_model, rows
from tests.torch.worlds import on_ranks

COUNT = 3 << 18
"""Values of a tensor that is too large to be copied into a message."""


def _group() -> ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    return group


def sharded(*, is_shared: bool, **settings: Any) -> nn.Module:
    """Return a model with each block and the rest sharded; their buffers are shared if wanted."""
    model = make_model()
    for block in (model[0], model[1]):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    for module in model.modules():
        if is_shared and isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def trained(*, is_shared: bool, **settings: Any) -> list[torch.Tensor]:
    """Return the parameters in full, as bits, after some steps."""
    model = sharded(is_shared=is_shared, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(rows(step, dist.get_rank())[0]).float().square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def assert_equal_bits(settings: dict[str, Any]) -> None:
    for got, wanted in zip(trained(is_shared=True, **settings), trained(is_shared=False, **settings), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_two_ranks_train_alike(reshards: bool) -> None:
    assert_equal_bits({"reshard_after_forward": reshards})


@on_ranks(4)
def test_four_ranks_train_alike() -> None:
    assert_equal_bits({})


@on_ranks(4, fresh=True)  # torch keeps names of groups by mesh, also of meshes that are gone
def test_hybrid_sharding_trains_alike() -> None:
    assert_equal_bits({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))})


@on_ranks(2)
def test_mixed_precision_trains_alike() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_equal_bits({"mp_policy": policy})


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_tensors_of_shared_memory_are_gathered_and_reduced(dtype: str) -> None:
    kind, rank = getattr(torch, dtype), dist.get_rank()
    whole = _group().allocate_tensor(2 * COUNT, dtype=kind, device=torch.device("cpu"))
    assert whole.shape == (2 * COUNT,)
    assert whole.dtype == kind
    own = whole[rank * COUNT : (rank + 1) * COUNT]
    own.copy_((torch.arange(COUNT) % 7 + rank).to(kind))
    dist.all_gather_into_tensor(whole, own)
    for other in range(2):
        wanted = (torch.arange(COUNT) % 7 + other).to(kind)
        assert torch.equal(whole[other * COUNT : (other + 1) * COUNT].float(), wanted.float())
    if dtype in ("float32", "bfloat16", "int64"):
        part = _group().allocate_tensor(COUNT, dtype=kind)
        dist.reduce_scatter_tensor(part, whole)
        assert torch.equal(part, 2 * (torch.arange(COUNT) % 7 + rank).to(kind))


@on_ranks(2)
def test_memory_is_kept_for_the_next_tensor_of_its_size_once_all_views_are_gone() -> None:
    group = _group()
    first = group.allocate_tensor(COUNT, dtype=torch.float32)
    place, view = first.data_ptr(), first[5:].view(-1)
    del first
    gc.collect()
    second = group.allocate_tensor(COUNT, dtype=torch.float32)
    assert second.data_ptr() != place
    del view
    gc.collect()
    assert group.allocate_tensor(2 * COUNT, dtype=torch.bfloat16).data_ptr() == place


@on_ranks(2)
def test_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="expected the CPU, got meta"):
        _group().allocate_tensor(4, dtype=torch.float32, device="meta")
    assert not _group().supports_tensor_alloc("cuda")
    assert _group().allocate_tensor(0, dtype=torch.float32).shape == (0,)


def test_without_room_kept_memory_is_given_back_first_and_then_tensors_are_of_usual_memory() -> None:
    room = [8]

    def allocate(nbytes: int) -> NDArray[np.uint8]:
        if nbytes > room[0]:
            raise ArenaFull("no room")
        room[0] -= nbytes
        memory = np.zeros(nbytes, np.uint8)
        weakref.finalize(memory, lambda: room.__setitem__(0, room[0] + nbytes))
        return memory

    shared = SharedTensors(allocate)
    first = shared.empty(4, torch.uint8)
    del first
    assert room == [4]
    second = shared.empty(2, torch.float32)
    assert room == [0]
    assert shared.empty(1, torch.uint8).shape == (1,)
    assert room == [0]
    del second
    shared.clear()
    assert room == [8]
