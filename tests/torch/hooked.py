"""Models under DistributedDataParallel with our hook, whose gradients are known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncpar.torch import GradientHook, gradient_hook

SMALL_BUCKETS_MB = 0.004
SIZES = (700, 300, 1000, 90, 1600, 10)
"""Of the parameters of ``Linears``, which are matrices of ten columns: some buckets of ``SMALL_BUCKETS_MB``."""


class Linears(nn.Module):
    """A sum of products, whose gradient is the input."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size // 10, 10, dtype=dtype)) for size in SIZES)

    def forward(self, inputs: list[torch.Tensor], used: list[int] | None = None) -> torch.Tensor:
        pairs = list(zip(self.weights, inputs, strict=True))
        chosen = pairs if used is None else [pairs[index] for index in used]
        return sum((weight * x.view_as(weight)).sum() for weight, x in chosen)


def make_inputs(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the gradients of a rank in a step: drawn, and the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def make_mlp(seed: int = 0) -> nn.Sequential:
    """Return a small network with the same weights on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def hooked(
    module: nn.Module, *, bucket_mb: float = SMALL_BUCKETS_MB, ddp: dict[str, Any] | None = None, **settings: Any
) -> tuple[DistributedDataParallel, GradientHook]:
    """Return ``module`` under DistributedDataParallel with our hook; ``settings`` are the hook's."""
    model = DistributedDataParallel(module, bucket_cap_mb=bucket_mb, **(ddp or {}))
    state = GradientHook(**{"minimum_bytes": 0, **settings})
    model.register_comm_hook(state, gradient_hook)
    return model, state


def train(
    model: nn.Module, *, steps: int, rate: float = 0.3, first: int = 0, finished: Callable[[int], None] | None = None
) -> list[float]:
    """Train a network of ``make_mlp`` to find which half of the inputs is larger, and return this rank's losses."""
    rank, losses = dist.get_rank(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(first, first + steps):
        x = torch.randn(32, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        wanted = torch.stack([x[:, 4 * part : 4 * part + 4].sum(1) for part in range(5)], 1).argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if finished is not None:
            finished(step)
    return losses


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters in a row."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """Return all gradients in a row, zeros for those that there are none of."""
    return torch.cat(
        [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in model.parameters()
        ]
    )


def assert_same_everywhere(x: torch.Tensor) -> None:
    """Assert that ``x`` is the same on all ranks, bit for bit."""
    others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(others, x)
    for rank, other in enumerate(others):
        torch.testing.assert_close(x, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, r=rank: f"rank {r}: {m}")


def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``x`` over all ranks."""
    total = x.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()
