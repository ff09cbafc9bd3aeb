"""Buffers and parameters of replicas are copied from one rank, small ones together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.torch import DistributedDataParallel, ProcessGroup
from asyncpar.torch.replicas.copies import copy_from, refuse_copies
from tests.torch.models import WIDTH
from tests.torch.worlds import on_ranks

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def _group() -> ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    return group


def _tensors(rank: int) -> list[torch.Tensor]:
    """Return tensors of all dtypes, shapes and layouts that buffers have, and large ones."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES]
    found += [torch.tensor(rank), torch.tensor([]), torch.randn(4, 6, generator=generator).t()]
    found += [torch.randn(1 << 17, generator=generator), torch.randn(3, generator=generator)]
    return found + [torch.randn(40_000, generator=generator) for _ in range(8)]


@on_ranks(2)
@pytest.mark.parametrize("source", [0, 1])
def test_all_tensors_are_those_of_the_source(source: int) -> None:
    tensors = _tensors(dist.get_rank())
    copy_from(source, tensors, _group())
    for got, wanted in zip(tensors, _tensors(source), strict=True):
        assert torch.equal(
            got.reshape(-1).contiguous().view(torch.uint8), wanted.reshape(-1).contiguous().view(torch.uint8)
        )


@on_ranks(2)
def test_copies_that_one_rank_refuses_end_on_the_other_and_the_next_ones_meet() -> None:
    tensors = _tensors(0)
    if dist.get_rank():
        refuse_copies(tensors, _group(), UsageError("not now"))
    else:
        with pytest.raises(PeerCancelled, match="not now"):
            copy_from(0, tensors, _group())
    copy_from(1, tensors, _group())


@on_ranks(2)
def test_norms_take_one_message_before_a_forward() -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(5)]))
    group = _group()
    x = torch.randn(4, WIDTH)
    begun = []
    for _ in range(3):
        before = group._get_sequence_number_for_group()  # noqa: SLF001  # torch: the number of operations so far
        y = model(x)
        begun.append(group._get_sequence_number_for_group() - before)  # noqa: SLF001
        y.square().sum().backward()
    assert begun == [1, 1, 1]


@on_ranks(2)
def test_what_an_earlier_forward_keeps_of_buffers_does_not_count_as_changed() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval())
    first = model(torch.ones(4, WIDTH))
    (first + model(torch.ones(4, WIDTH))).sum().backward()
