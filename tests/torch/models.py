"""Small models whose training on many ranks must equal that in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8
BATCH = 4
"""Rows of each rank."""


class Block(nn.Module):
    """A small network with a norm, a residual, and an unused part if wanted."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(torch.relu(self.first(x))))


def make_model(**settings: Any) -> nn.Module:
    """Return the same model everywhere."""
    torch.manual_seed(7)
    return nn.Sequential(Block(**settings), Block(**settings), nn.Linear(WIDTH, 3))


def rows(step: int, rank: int | None = None, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a step: of all ranks, or of one."""
    size = dist.get_world_size() if size is None else size
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size * BATCH, WIDTH, generator=generator)
    y = torch.randn(size * BATCH, 3, generator=generator)
    if rank is None:
        return x, y
    part = slice(rank * BATCH, (rank + 1) * BATCH)
    return x[part], y[part]


def train(
    model: nn.Module,
    steps: int = 3,
    *,
    rank: int | None = None,
    size: int | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> list[float]:
    """Train on the rows of a rank (all rows by default) and return the losses."""
    stepping = optimizer(model.parameters(), lr=0.1, **settings)
    losses = []
    for step in range(steps):
        x, y = rows(step, rank, size)
        stepping.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses


def assert_close(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], **tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


def assert_parameters(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """Assert that two models have the same parameters, up to rounding."""
    assert_close(list(model.parameters()), list(expected.parameters()), **tolerance)


def assert_same_everywhere(tensors: Sequence[torch.Tensor]) -> None:
    """Assert that all ranks have the same bits."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    for rank, copy in enumerate(copies):
        assert torch.equal(copy, flat), f"rank {rank} has other values"
