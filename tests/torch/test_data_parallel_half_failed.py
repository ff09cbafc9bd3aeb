"""A step that fails on some ranks only: whatever the others have learnt in it, ranks are alike two steps later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from asyncpar.errors import AsyncparError, OperationMismatch, PeerTimeout, UsageError
from asyncpar.torch import DistributedDataParallel
from asyncpar.torch.replicas.backward import wait_for_all
from tests.torch.worlds import on_ranks

WIDTH = 8
BUCKET_MB = 2 * WIDTH * WIDTH * 4 / (1 << 20)
"""Two weights in each bucket."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "codec": {"codec": "int8"},
    "hook": {},
    "one bucket": {"bucket_cap_mb": 25},
}


class Crossed(nn.Module):
    """Layers of equal sizes that are used in another order than they are registered in, and an embedding."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, sparse=is_sparse)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for index in (3, 0, 5, 2, 4, 1):
            x = torch.tanh(self.layers[index](x))
        return x


class Table(nn.Module):
    """A model that has sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.tensor([rank, 2, 4 - rank])).square().sum() * (rank + 1)


def step(model: nn.Module) -> None:
    model.zero_grad()
    loss(model, dist.get_rank()).backward()


def assert_means(model: DistributedDataParallel, *, atol: float = 1e-6) -> None:
    """Fail unless gradients are the means over both ranks, which are computed here without communication."""
    found = [each.grad for each in model.parameters()]
    expected = [
        torch.autograd.grad(loss(model.module, rank), [*model.module.parameters()], materialize_grads=True)
        for rank in range(2)
    ]
    for mine, one, other in zip(found, *expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.to_dense(), (one.to_dense() + other.to_dense()) / 2, rtol=0, atol=atol)


@contextmanager
def late_timeout() -> Iterator[None]:
    """Let the step fail here after it has sent all that it had to send, as by a timeout in its last moment."""

    def wait(works: Any) -> None:
        wait_for_all(works)
        raise PeerTimeout("too late", rank=1)

    with mock.patch("asyncpar.torch.replicas.reducer.wait_for_all", wait):
        yield


def fail_on_rank_0(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        with late_timeout(), pytest.raises(PeerTimeout, match="too late"):
            step(model)
    else:
        step(model)


def make(way: str) -> DistributedDataParallel:
    torch.manual_seed(3)
    model = DistributedDataParallel(Crossed(), **{"bucket_cap_mb": BUCKET_MB} | WAYS[way])
    if way == "hook":
        model.register_comm_hook(None, allreduce_hook)
    return model


def assert_next_steps_work(model: DistributedDataParallel, way: str = "") -> None:
    for _ in range(4):
        step(model)
        assert_means(model, atol=0.1 if way == "codec" else 1e-6)
    total = torch.ones(1)
    dist.all_reduce(total)  # its place in the order of operations is the same on both
    assert total.item() == 2


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_first_step_that_fails_on_one_rank_only(way: str) -> None:
    model = make(way)
    fail_on_rank_0(model)
    with pytest.raises((OperationMismatch, RuntimeError), match="gradients in no agreed order") as caught:
        step(model)
    if dist.get_rank() == 1:
        assert "An earlier step has failed on some of the ranks only" in "".join(caught.value.__notes__)
    assert_next_steps_work(model, way)


@on_ranks(2)
def test_sparse_gradients_alone() -> None:
    torch.manual_seed(3)
    model = DistributedDataParallel(Table())
    fail_on_rank_0(model)
    with pytest.raises(OperationMismatch, match="gradients in no agreed order"):
        step(model)
    assert_next_steps_work(model)


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_fails_in_the_next_step(way: str, rank: int) -> None:
    model = make(way)
    fail_on_rank_0(model)
    handle = model.module.layers[2].weight.register_hook(fail)
    if dist.get_rank() != rank:
        handle.remove()
    with pytest.raises((AsyncparError, RuntimeError, ArithmeticError)):
        step(model)
    handle.remove()
    try:
        step(model)
    except (AsyncparError, RuntimeError) as error:
        assert "gradients in no agreed order" in str(error)  # noqa: PT017  # it need not fail
    assert_next_steps_work(model, way)


def fail(_: torch.Tensor) -> None:
    raise ArithmeticError("it breaks")


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_later_step_that_fails_on_one_rank_only_changes_nothing(way: str, steps: int) -> None:
    model = make(way)
    for _ in range(steps):
        step(model)
    fail_on_rank_0(model)
    assert_next_steps_work(model, way)


@on_ranks(2)
def test_both_fail_in_turn() -> None:
    model = make("plain")
    fail_on_rank_0(model)
    with pytest.raises(UsageError):
        step(model)
    fail_on_rank_0(model)
    with pytest.raises(OperationMismatch):
        step(model)
    assert_next_steps_work(model)


@on_ranks(2)
def test_another_mismatch_is_not_put_down_to_an_earlier_step() -> None:
    """A program that calls one operation more on rank 1: its error says that, and ranks keep the order they know."""
    model = make("plain")
    step(model)
    works: list[Any] = []
    if dist.get_rank() == 1:
        works.append(dist.all_reduce(torch.ones(7), async_op=True))
    with pytest.raises(OperationMismatch) as caught:
        step(model)
    assert "An earlier step" not in "".join(getattr(caught.value, "__notes__", []))
    if dist.get_rank() == 0:  # it takes the place that it has too few
        works.append(dist.all_reduce(torch.ones(7), async_op=True))
    for work in works:
        with suppress(AsyncparError):
            work.wait()
    assert_next_steps_work(model)
