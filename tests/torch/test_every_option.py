"""Every option of the public names of ``asyncpar.torch`` changes something that can be seen.

The tables of ``tests/options`` do the same for all other packages.  ``ProcessGroup`` and ``Work`` are made by torch.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import asyncpar.torch
from asyncpar.elasticity.worlds import LoneWorld, Membership
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.gradsync import TuningConfig
from asyncpar.torch import (
    DistributedDataParallel,
    GradientHook,
    ModuleStage,
    ThreadRanks,
    elastic,
    module_stages,
    run_threads,
    torch_loss,
)
from asyncpar.torch.replicas.data_parallel import ONLY_VALUES
from asyncpar.torch.stage.parameters import BoundParameter
from tests.torch.hooked import Linears, hooked, make_inputs

RANKS = 3


def all_options() -> set[str]:
    """Return what can be left out in calls of the public names."""
    return {
        f"{name}.{parameter.name}"
        for name in asyncpar.torch.__all__
        for parameter in inspect.signature(getattr(asyncpar.torch, name)).parameters.values()
        if parameter.default is not inspect.Parameter.empty
    }


def hook(**settings: Any) -> Any:
    """Return figures, kept tensors and gradients of two steps of three ranks on one host."""

    def steps(rank: int) -> Any:
        model, state = hooked(Linears(), **settings)
        for step in range(2):
            model.zero_grad()
            model(make_inputs(rank, step)).backward()
        figures = state.statistics()
        kept = state.state_dict()["residuals"]
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        return figures.buckets_compressed, sorted(map(str, kept)), [one.tolist() for one in gradients]

    return run_threads(RANKS, steps)


def group_of_hook(*, alone: bool = False) -> Any:
    """Return how many ranks a hook is for."""

    def ranks(rank: int) -> int:
        groups = [dist.new_group([one]) for one in range(RANKS)]
        return GradientHook(group=groups[rank] if alone else None).statistics().ranks

    return run_threads(RANKS, ranks)


def named(*, is_named: bool = False) -> Any:
    """Return by what names a hook keeps residuals."""

    def keys(rank: int) -> list[str]:
        module = Linears()
        model, state = hooked(module, **({"parameters": module.named_parameters()} if is_named else {}))
        model(make_inputs(rank, 0)).backward()
        return sorted(map(str, state.state_dict()["residuals"]))

    return run_threads(RANKS, keys)


def drawn(make: Callable[..., ModuleStage], **settings: Any) -> Any:
    """Return what dropout leaves."""
    y, _ = make(**settings).forward(np.ones((8, 8), np.float32))
    return y.tolist()


def one_stage(**settings: Any) -> ModuleStage:
    return ModuleStage("it", torch.nn.Dropout(0.5), **settings)


def one_of_several(**settings: Any) -> ModuleStage:
    return module_stages({"it": torch.nn.Dropout(0.5)}, **settings)[0]


def shared(*, is_shared: bool = False) -> bool:
    """Return whether a stage has a parameter of an earlier stage, for the same weight."""
    weight = torch.nn.Linear(4, 4, bias=False)
    first = ModuleStage("first", weight)
    known = [one for one in first.parameters() if isinstance(one, BoundParameter)]
    second = ModuleStage("second", weight, shared=known) if is_shared else ModuleStage("second", weight)
    return second.parameters()[0] is first.parameters()[0]


def scaled(**settings: Any) -> Any:
    """Return the loss and its gradient."""
    loss, gradient = torch_loss(torch.nn.functional.mse_loss, **settings)(
        np.ones(4, np.float32), np.zeros(4, np.float32)
    )
    return loss, gradient.tolist()


def patience(**settings: Any) -> str:
    """Return how ranks that take a while end."""
    try:
        ThreadRanks(1, **settings).run(lambda _: time.sleep(0.2))
    except PeerTimeout:
        return "not over in time"
    return "over"


def trained(**settings: Any) -> Any:
    """Return the parameters after two elastic steps of a model with dropout."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    with elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), portions=2, **settings) as job:
        for step in job.steps(until=2):
            with step:
                for portion in step.portions:
                    loss = model(torch.ones(4, 8) * (portion + 1)).square().mean()
                    loss.backward()
                    step.add(portion, loss)
                step.update()
    return [one.tolist() for one in model.parameters()]


class Parts(torch.nn.Module):
    """Two layers, of which it may leave one out, and a buffer that each rank changes in another way."""

    def __init__(self, rank: int, *, leaves_out: bool, width: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        for each in self.parameters():  # threads share torch's random numbers
            each.data = torch.arange(float(each.numel())).sin().view(each.shape) + rank
        self.register_buffer("seen", torch.zeros(1))
        self._rank = rank
        self._leaves_out = leaves_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self._rank + 1
        x = self.first(x)
        return x if self._leaves_out else self.last(x)


def replicated(*, leaves_out: bool = False, is_alone: bool = False, width: int = 4, **settings: Any) -> Any:
    """Return buckets, gradients, parameters and the buffer after two backward passes of three ranks, or that they fail.

    ``is_alone``: each rank is a group of its own.
    """

    def steps(rank: int) -> Any:
        groups = [dist.new_group([one]) for one in range(RANKS)]
        try:
            model = DistributedDataParallel(
                Parts(rank, leaves_out=leaves_out, width=width),
                process_group=groups[rank] if is_alone else None,
                **settings,
            )
            for _ in range(2):
                model(torch.full((2, width), float(rank))).square().mean().backward()
        except UsageError:
            return "refused"
        gradients = [None if one.grad is None else one.grad.tolist() for one in model.parameters()]
        return model.bucket_sizes, gradients, [one.tolist() for one in model.parameters()], model.module.seen.tolist()

    return run_threads(RANKS, steps)


class NotedWorld(LoneWorld):
    """A world of one that notes whether somebody has joined it."""

    def __init__(self) -> None:
        self.is_joined = False

    async def join(self, *arguments: Any, **settings: Any) -> Membership:
        self.is_joined = True
        return await super().join(*arguments, **settings)


def joined(*, is_given: bool = False) -> bool:
    """Return whether a job has joined a source of worlds."""
    source = NotedWorld()
    trained(source=source if is_given else None)
    return source.is_joined


EFFECTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DistributedDataParallel.bucket_cap_mb": (replicated, {"bucket_cap_mb": 0.0001}),
    "DistributedDataParallel.broadcast_buffers": (replicated, {"broadcast_buffers": False}),
    "DistributedDataParallel.codec": (partial(replicated, width=128), {"codec": "sign"}),
    "DistributedDataParallel.find_unused_parameters": (
        partial(replicated, leaves_out=True),
        {"find_unused_parameters": True},
    ),
    "DistributedDataParallel.init_sync": (replicated, {"init_sync": False}),
    "DistributedDataParallel.process_group": (replicated, {"is_alone": True}),
    "DistributedDataParallel.static_graph": (partial(replicated, leaves_out=True), {"static_graph": True}),
    "DistributedDataParallel.tuning": (replicated, {"tuning": TuningConfig(pin="0.0001m")}),
    "DistributedDataParallel.forward_sync_buffers": (replicated, {"forward_sync_buffers": False}),
    **{f"DistributedDataParallel.{name}": (replicated, {name: object()}) for name in ONLY_VALUES},
    "GradientHook.codec": (hook, {"codec": "sign"}),
    "GradientHook.error_feedback": (hook, {"error_feedback": False}),
    "GradientHook.minimum_bytes": (hook, {"minimum_bytes": 1 << 14}),
    "GradientHook.warm_up_steps": (hook, {"warm_up_steps": 1}),
    "GradientHook.hosts": (hook, {"hosts": [[0, 1], [2]]}),
    "GradientHook.group": (group_of_hook, {"alone": True}),
    "GradientHook.parameters": (named, {"is_named": True}),
    "ModuleStage.seed": (partial(drawn, one_stage), {"seed": 1}),
    "ModuleStage.shared": (shared, {"is_shared": True}),
    "module_stages.seed": (partial(drawn, one_of_several), {"seed": 1}),
    "torch_loss.scale": (scaled, {"scale": 0.5}),
    "ThreadRanks.timeout": (patience, {"timeout": 0.05}),
    "elastic.codec": (trained, {"codec": "sign"}),
    "elastic.residual_codec": (partial(trained, codec="topk:0.2"), {"residual_codec": "int8"}),
    "elastic.seed": (trained, {"seed": 1}),
    "elastic.source": (joined, {"is_given": True}),
}


def test_every_option_has_an_entry() -> None:
    assert all_options() == EFFECTS.keys()


@pytest.mark.parametrize("option", EFFECTS)
def test_another_value_than_the_default_can_be_seen(option: str) -> None:
    probe, changes = EFFECTS[option]
    assert probe(**changes) != usual(probe)


@cache
def usual(probe: Callable[..., Any]) -> Any:
    """Return what is seen with the default, which must be the same whenever it is run."""
    first = probe()
    assert probe() == first
    return first
