"""Ranks with different numbers of batches under ``asyncpar.torch.DistributedDataParallel``, as under torch's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchReplicas

from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.torch import DistributedDataParallel
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.worlds import on_ranks

SMALL_BUCKETS_MB = 0.0005
BATCH = 4


class Chosen(nn.Module):
    """A part that is used in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.second(self.first(x)) if self.step % 2 else self.first(x)


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Block, {}),
    "norms": (_norms, {}),
    "norms of each rank": (_norms, {"broadcast_buffers": False}),
    "unused": (Chosen, {"find_unused_parameters": True}),
    "static": (Block, {"static_graph": True}),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]()


def train(model: Any, counts: Sequence[int], *, accumulates: bool = False, **settings: Any) -> None:
    """Train on as many batches as ``counts`` has for this rank."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    with model.join(**settings):
        for turn in range(counts[rank]):
            is_part = accumulates and turn % 2 == 0
            if not accumulates or is_part:
                optimizer.zero_grad()
            with model.no_sync() if is_part else nullcontext():
                model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
            if not is_part:
                optimizer.step()


def assert_close(got: nn.Module, expected: nn.Module, tolerance: float) -> None:
    ours, theirs = got.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance)


@on_ranks(2)
@pytest.mark.parametrize("counts", [(2, 5), (4, 1), (3, 0), (0, 3), (2, 2)])
@pytest.mark.parametrize("name", list(MODELS))
def test_parameters_are_those_of_torch_bit_for_bit(name: str, counts: Sequence[int]) -> None:
    """torch's class has no join with static graphs on ranks without batches; they change no bits of it."""
    settings = MODELS[name][1]
    ours = DistributedDataParallel(make(name), bucket_cap_mb=SMALL_BUCKETS_MB, **settings)
    theirs = TorchReplicas(make(name), bucket_cap_mb=SMALL_BUCKETS_MB, **(settings | {"static_graph": False}))
    train(ours, counts)
    train(theirs, counts)
    assert_close(ours, theirs, 0.0)
    assert_same_everywhere(list(ours.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("divides_by_initial", [True, False])
@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("name", ["plain", "unused"])
def test_gradients_are_those_of_torch_in_each_step_and_after_it(
    name: str, as_views: bool, divides_by_initial: bool
) -> None:
    def run(wrap: Callable[..., Any], **settings: Any) -> list[torch.Tensor]:
        model = wrap(make(name), **MODELS[name][1], **settings)
        found = []
        generator = torch.Generator().manual_seed(dist.get_rank())
        with model.join(divide_by_initial_world_size=divides_by_initial):
            for _ in range((2, 5)[dist.get_rank()]):
                model.zero_grad()
                model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
                found += _gradients(model)
        return [*found, *_gradients(model)]

    group = dist.new_group(backend="gloo")
    ours = run(DistributedDataParallel)
    theirs = run(TorchReplicas, process_group=group, gradient_as_bucket_view=as_views)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return them with zeros for none: torch's class has zeros for what nobody uses while a rank is through."""
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]


@on_ranks(4)
@pytest.mark.parametrize("divides_by_initial", [True, False])
def test_four_ranks_divide_by_all_or_by_those_that_are_left(divides_by_initial: bool) -> None:
    counts = (2, 4, 1, 6)
    group = dist.new_group(backend="gloo")
    ours, theirs = DistributedDataParallel(make("plain")), TorchReplicas(make("plain"), process_group=group)
    for model in (ours, theirs):
        train(model, counts, divide_by_initial_world_size=divides_by_initial)
    assert_close(ours, theirs, 1e-6)
    assert_same_everywhere(list(ours.parameters()))


@on_ranks(2)
def test_ranks_that_are_through_do_not_reduce_where_others_accumulate() -> None:
    ours, theirs = DistributedDataParallel(make("norms")), TorchReplicas(make("norms"))
    for model in (ours, theirs):
        train(model, (2, 6), accumulates=True)
    assert_close(ours, theirs, 1e-6)


@on_ranks(2)
def test_error_feedback_of_ranks_that_are_through_is_still_sent() -> None:
    model = DistributedDataParallel(make("plain"), codec="topk:0.1")
    train(model, (2, 5))
    assert_same_everywhere(list(model.parameters()))
    train(model, (3, 3))
    assert_same_everywhere(list(model.parameters()))


@on_ranks(2)
def test_an_optimizer_joins_with_its_model() -> None:
    model = DistributedDataParallel(make("plain"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Join([model, optimizer]):
        for _ in range((2, 5)[dist.get_rank()]):
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
    assert_same_everywhere(list(model.parameters()))


@on_ranks(2)
def test_all_ranks_stop_with_the_first_if_they_are_told_to() -> None:
    model = DistributedDataParallel(make("plain"))
    with pytest.raises(RuntimeError, match="exhausted"):
        train(model, (2, 5), throw_on_early_termination=True)
    train(model, (1, 2))
    assert_same_everywhere(list(model.parameters()))


@on_ranks(2)
def test_after_it_ranks_train_as_before_it() -> None:
    ours, theirs = DistributedDataParallel(make("plain")), TorchReplicas(make("plain"))
    for model in (ours, theirs):
        train(model, (1, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert_close(ours, theirs, 0.0)


class Breaking(nn.Module):
    """A network that breaks on rank 1 in the third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.step = make("norms"), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.step == 3 and dist.get_rank() == 1:
            raise ArithmeticError("it breaks")
        return self.body(x)


@on_ranks(2)
def test_what_breaks_while_others_are_through_ends_their_block_too() -> None:
    model = DistributedDataParallel(Breaking(), bucket_cap_mb=SMALL_BUCKETS_MB)
    with pytest.raises((ArithmeticError, PeerCancelled), match="it breaks"):
        train(model, (1, 5))
    train(model, (2, 3))
    assert_same_everywhere(list(model.parameters()))


@on_ranks(2)
def test_ranks_of_which_some_reduce_and_others_do_not_are_told() -> None:
    model = DistributedDataParallel(make("plain"))
    x = torch.ones(BATCH, WIDTH)
    leaves = model.no_sync() if dist.get_rank() == 0 else nullcontext()
    with pytest.raises(UsageError, match=r"rank 0 without reduction .* rank 1 with reduction"), model.join(), leaves:
        model(x)
    train(model, (1, 2))


@on_ranks(2)
def test_parts_that_nobody_uses_keep_no_gradient_while_a_rank_is_through() -> None:
    model = DistributedDataParallel(make("unused"), find_unused_parameters=True)
    with model.join():
        for step in range((0, 4)[dist.get_rank()]):
            model.zero_grad()
            model(torch.ones(BATCH, WIDTH)).square().mean().backward()
            assert (model.module.second.weight.grad is None) == bool(step % 2)
