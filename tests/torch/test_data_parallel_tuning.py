"""Buckets of ``asyncpar.torch.DistributedDataParallel`` that are tuned while it trains."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import TuningConfig
from asyncpar.torch import DistributedDataParallel, GradientHook, gradient_hook
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.worlds import on_ranks

EAGER = TuningConfig(budget=0.5, bucket_sizes_mb=(1.0, 4.0), segments=("256k",))


class Wide(nn.Module):
    """Parameters whose gradients take longer to reduce than to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.full((1 << 20,), 0.1 * part) for part in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for part in self.parts:
            total = total + (part * x.mean()).mean()
        return total


class Breaking(nn.Module):
    """A network that fails on rank 1 while it is ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_module()
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken and dist.get_rank() == 1:
            raise ArithmeticError("it breaks")
        return self.body(x)


def make_module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()


def tables(model: DistributedDataParallel) -> list[str]:
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, model.tuning_table())
    return everyone


@on_ranks(2)
@pytest.mark.parametrize("finds_unused", [False, True])
def test_ranks_try_other_buckets_and_train_the_same(finds_unused: bool) -> None:
    plain = DistributedDataParallel(Wide(), find_unused_parameters=finds_unused)
    tuned = DistributedDataParallel(Wide(), find_unused_parameters=finds_unused, tuning=EAGER)
    assert plain.tuning_table() == ""
    assert plain.tuning_outcome() is None
    table = ""
    steps = 0
    while steps < 60 or (len(table.splitlines()) <= 3 and steps < 2_000):  # a delay may use up the budget of trials
        steps += 2
        train(plain, 2)
        train(tuned, 2)
        (table,) = {*tables(tuned)}
        assert f"{steps} steps" in table
    for one, other in zip(plain.parameters(), tuned.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert_same_everywhere([*tuned.parameters()])
    assert len(table.splitlines()) > 3, table


@on_ranks(2)
@pytest.mark.parametrize("pin", ["0.0005m", "0.0005m@ring", "@tree", "1m@halving/64k"])
def test_what_is_pinned_is_used(pin: str) -> None:
    model = DistributedDataParallel(make_module(), tuning=TuningConfig(pin=pin))
    train(model, 6)
    assert (len(model.bucket_sizes) > 1) == pin.startswith("0.0005m")
    outcome = model.tuning_outcome()
    assert outcome is not None
    assert outcome.best.endswith(pin)
    _, _, algorithm = pin.partition("@")
    traffic = model.process_group.communicator.traffic
    assert not algorithm or traffic.of("all_reduce", algorithm).calls >= 6
    assert_same_everywhere([*model.parameters()])


@on_ranks(2)
def test_a_pin_that_cannot_run_is_refused_on_all_ranks() -> None:
    with pytest.raises(UsageError, match="star cannot run here"):
        DistributedDataParallel(make_module(), tuning=TuningConfig(pin="@star"))
    train(DistributedDataParallel(make_module()), 2)


@on_ranks(2)
def test_other_tuning_on_one_rank_is_an_error_on_all() -> None:
    tuning = TuningConfig(pin="4m" if dist.get_rank() else "1m")
    with pytest.raises(SettingsDiffer, match="1m"):
        DistributedDataParallel(make_module(), tuning=tuning)
    with pytest.raises(AsyncparError, match="tuning: expected a TuningConfig or None, got str"):
        DistributedDataParallel(make_module(), tuning="4m" if dist.get_rank() else TuningConfig())  # type: ignore[arg-type]


@on_ranks(2)
def test_codecs_are_not_tuned() -> None:
    with pytest.raises(UsageError, match="tuning: expected no codec"):
        DistributedDataParallel(make_module(), codec="int8", tuning=TuningConfig())
    model = DistributedDataParallel(make_module(), tuning=TuningConfig())
    with pytest.raises(UsageError, match="tuning: expected no codec"):
        model.register_comm_hook(GradientHook(codec="int8"), gradient_hook)
    train(model, 2)


@on_ranks(2)
def test_a_step_that_fails_begins_the_search_anew_on_all_ranks() -> None:
    module = Breaking()
    model = DistributedDataParallel(module, tuning=EAGER)
    for steps in (7, 10, 8):
        train(model, steps)
        outcome = model.tuning_outcome()
        assert outcome is not None
        assert 0 < outcome.steps <= steps
        module.broken = True
        with pytest.raises((ArithmeticError, AsyncparError)):
            model(torch.randn(4, WIDTH)).square().mean().backward()
        module.broken = False
    train(model, 10)
    (table,) = {*tables(model)}
    assert "10 steps" in table
    assert_same_everywhere([*model.parameters()])
