"""Functional collectives, and collectives that autograd goes through."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from tests.torch.values import assert_same, draw, everyone, reduced
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process


@on_ranks(4)
def test_functional_collectives_leave_their_inputs_alone() -> None:
    mine = dist.get_rank()
    x = draw(mine, shape=(8, 2))
    every = everyone(shape=(8, 2))
    total = reduced("SUM", every)
    assert_same(functional.all_reduce(x, "sum", dist.group.WORLD).clone(), total)
    assert_same(functional.all_reduce(x, "avg", dist.group.WORLD).clone(), reduced("AVG", every))
    assert_same(functional.all_gather_single(x, 0, dist.group.WORLD).clone(), torch.cat(every))
    assert_same(functional.all_gather_single(x, 1, dist.group.WORLD).clone(), torch.cat(every, 1))
    assert_same(functional.reduce_scatter_single(x, "sum", 0, dist.group.WORLD).clone(), total[2 * mine : 2 * mine + 2])
    assert_same(functional.broadcast(x, 2, dist.group.WORLD).clone(), every[2])
    swapped = functional.all_to_all_single(x, None, None, dist.group.WORLD).clone()
    assert_same(swapped, torch.cat([other[2 * mine : 2 * mine + 2] for other in every]))
    moved = functional.permute_tensor(x.view(-1), [1, 2, 3, 0], dist.group.WORLD).clone()
    assert_same(moved, every[(mine - 1) % 4].view(-1))
    assert_same(x, draw(mine, shape=(8, 2)))


@on_ranks(4)
def test_coalesced_functional_collectives_give_lists() -> None:
    mine = dist.get_rank()
    xs = [draw(mine, shape=(4, n)) for n in (1, 3)]
    every = [everyone(shape=(4, n)) for n in (1, 3)]
    for got, want in zip(functional.all_reduce_coalesced(xs, "sum", dist.group.WORLD), every, strict=True):
        assert_same(got.clone(), reduced("SUM", want))
    for got, want in zip(functional.all_gather_into_tensor_coalesced(xs, dist.group.WORLD), every, strict=True):
        assert_same(got.clone(), torch.cat(want))
    scattered = functional.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], dist.group.WORLD)
    for got, want in zip(scattered, every, strict=True):
        assert_same(got.clone(), reduced("SUM", want)[mine : mine + 1])


@on_ranks(2)
def test_gradients_flow_through_functional_collectives() -> None:
    mine = dist.get_rank()
    ranks = dist.group.WORLD
    x = draw(mine, shape=(4, 2)).requires_grad_()
    functional.all_gather_tensor_autograd(x, 0, ranks).square().sum().backward()
    assert_same(x.grad, 2 * 2 * x.detach())
    x.grad = None
    functional.reduce_scatter_tensor_autograd(x, "sum", 0, ranks).sum().backward()
    assert_same(x.grad, torch.ones(4, 2))
    x.grad = None
    (functional.all_to_all_single_autograd(x, [2, 2], [2, 2], ranks) * (mine + 1)).sum().backward()
    assert_same(x.grad, torch.tensor([1.0, 1.0, 2.0, 2.0]).reshape(4, 1).expand(4, 2).contiguous())


@on_ranks(2)
def test_gradients_flow_through_collectives_for_modules() -> None:
    mine = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = draw(mine).requires_grad_()
        differentiable.all_reduce(x).square().sum().backward()
        assert_same(x.grad, 4 * reduced("SUM", everyone()))
        x.grad = None
        torch.stack(list(differentiable.all_gather(x))).square().sum().backward()
        assert_same(x.grad, 2 * 2 * x.detach())
        x.grad = None
        differentiable.broadcast(x, 0).sum().backward()
        assert_same(x.grad, torch.full((5, 3), 2.0 if mine == 0 else 0.0))
        outputs = list(differentiable.all_to_all([torch.empty(5, 3) for _ in range(2)], [x, 2 * x]))
        x.grad = None
        sum(output.sum() for output in outputs).backward()
        assert_same(x.grad, torch.full((5, 3), 3.0))


@on_ranks(2)
def test_groups_are_found_by_name() -> None:
    group = dist.new_group()
    x = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", group.group_name)  # noqa: SLF001  # torch: the operators by which compiled code calls collectives by the group's name
    assert_same(torch.ops._c10d_functional.wait_tensor(x), torch.full((3,), 2.0))  # noqa: SLF001  # torch: the operators by which compiled code calls collectives by the group's name
