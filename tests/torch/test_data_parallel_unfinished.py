"""A step that one rank never finishes ends on the others with its number, and the next step works on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpar.core.config.names import Name
from asyncpar.errors import AsyncparError, OperationMismatch, PeerCancelled, PeerTimeout
from asyncpar.torch import DistributedDataParallel, ProcessGroup
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.ranks import TIMEOUT
from tests.torch.worlds import on_ranks

SMALL_BUCKETS_MB = 0.0005
SHORT = timedelta(seconds=1)


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()


def step_late(model: nn.Module) -> bool:
    """Take the step that rank 0 has given up: an error reports it, unless all that rank 0 had to send came before that.

    Return whether it succeeded.
    """
    try:
        step(model)
    except AsyncparError as error:
        assert "rank 0" in str(error)  # noqa: PT017  # it may also succeed
        return False
    return True


@contextmanager
def impatient(group: ProcessGroup) -> Iterator[None]:
    """Let this rank wait for others for ``SHORT``."""
    group.set_timeout(SHORT)
    try:
        yield
    finally:
        group.set_timeout(TIMEOUT)


def make(codec: str, steps: int) -> DistributedDataParallel:
    torch.manual_seed(1)
    group = dist.new_group([0, 1])  # whose timeout may change, while the default group goes on
    model = DistributedDataParallel(Block(), process_group=group, bucket_cap_mb=SMALL_BUCKETS_MB, codec=Name(codec))
    for _ in range(steps):
        step(model)
    return model


def assert_next_steps_work(model: nn.Module, before: list[torch.Tensor], *, is_first: bool, succeeded: bool) -> None:
    """Fail unless the steps work that follow one which ``succeeded`` on rank 1, not on rank 0."""
    succeeded_on_1 = torch.tensor([succeeded])
    dist.broadcast(succeeded_on_1, 1)
    if is_first and succeeded_on_1.item():  # rank 1 has learnt the order of gradients
        with pytest.raises(OperationMismatch):
            step(model)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), kept, rtol=0, atol=0)
    for _ in range(3):
        step(model)
        assert_same_everywhere([each.grad for each in model.parameters()])


@on_ranks(2)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_rank_that_leaves_out_a_backward_is_named(codec: str, steps: int) -> None:
    model = make(codec, steps)
    before, succeeded = [each.detach().clone() for each in model.parameters()], False
    if dist.get_rank() == 0:
        with impatient(model.process_group), pytest.raises(PeerTimeout) as caught:
            step(model)
        assert caught.value.rank == 1
        dist.barrier()
    else:
        model(torch.randn(4, WIDTH))
        dist.barrier()
        succeeded = step_late(model)
    assert_next_steps_work(model, before, is_first=not steps, succeeded=succeeded)


@on_ranks(2)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_rank_that_stays_in_a_backward_is_named(codec: str, steps: int) -> None:
    model = make(codec, steps)
    before, succeeded = [each.detach().clone() for each in model.parameters()], False
    if dist.get_rank() == 0:
        with impatient(model.process_group), pytest.raises(PeerTimeout) as caught:
            step(model)
        assert caught.value.rank == 1
        dist.barrier()
    else:
        handle = model.module.second.weight.register_hook(lambda _: dist.barrier())
        succeeded = step_late(model)
        handle.remove()
    assert_next_steps_work(model, before, is_first=not steps, succeeded=succeeded)


class Breaking(nn.Module):
    """A network with a norm that breaks on rank 1 on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.is_broken = nn.BatchNorm1d(WIDTH), Block(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken and dist.get_rank() == 1:
            raise ArithmeticError("it breaks")
        return self.body(self.norm(x))


@on_ranks(2)
@pytest.mark.parametrize("accumulates", [True, False])
def test_a_forward_that_breaks_leaves_ranks_agreed_on_when_buffers_are_copied(accumulates: bool) -> None:
    torch.manual_seed(2)
    model = DistributedDataParallel(Breaking())
    with model.no_sync() if accumulates else nullcontext():
        step(model)
    model.module.is_broken = True
    with pytest.raises((ArithmeticError, PeerCancelled), match="it breaks"):
        step(model)
    model.module.is_broken = False
    for _ in range(2):
        step(model)
        assert_same_everywhere([each.grad for each in model.parameters()])


@on_ranks(2)
def test_a_forward_without_a_backward_on_all_ranks_changes_nothing() -> None:
    model = make("none", 1)
    for _ in range(2):
        model(torch.randn(4, WIDTH))
    step(model)
    assert_same_everywhere([each.grad for each in model.parameters()])
