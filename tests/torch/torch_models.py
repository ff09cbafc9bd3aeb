"""A small transformer of torch, whole and cut into parts for the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

VOCABULARY = 13
FEATURES = 8
LENGTH = 5


class Embedding(torch.nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, FEATURES)
        self.places = torch.nn.Parameter(torch.randn(LENGTH, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.places[: x.shape[-1]]


class Block(torch.nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(FEATURES)
        self.qkv = torch.nn.Linear(FEATURES, 3 * FEATURES)
        self.out = torch.nn.Linear(FEATURES, FEATURES)
        self.norm2 = torch.nn.LayerNorm(FEATURES)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 16), torch.nn.GELU(), torch.nn.Linear(16, FEATURES), torch.nn.Dropout(dropout)
        )
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:-1], 2, 12).transpose(1, 2).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(x.shape)) * self.scale
        return x + self.mlp(self.norm2(x))


class Head(torch.nn.Module):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.out = torch.nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def make_parts(count: int, *, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> list[torch.nn.Module]:
    """Return ``count`` parts of one model, equal wherever they are made; one part is the whole model."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers: list[torch.nn.Module] = [
            Embedding(),
            *(Block(dropout=dropout) for _ in range(max(1, count - 2))),
            Head(),
        ]
        for layer in layers:
            layer.to(dtype)
    if count >= 3:
        return layers
    first = layers[: len(layers) + 1 - count]
    return [torch.nn.Sequential(*first), *layers[len(first) :]]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_tokens(count: int) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Return inputs and targets of ``count`` micro-batches, of different sizes."""
    rng = np.random.default_rng(5)
    shapes = [(1 + number % 3, LENGTH) for number in range(count)]
    return [rng.integers(0, VOCABULARY, one) for one in shapes], [rng.integers(0, VOCABULARY, one) for one in shapes]


def train_alone(
    parts: Sequence[torch.nn.Module], inputs: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]]
) -> list[float]:
    """Do what plain torch does with one micro-batch after another; gradients are in ``parts`` then."""
    whole = torch.nn.Sequential(*parts)
    losses = []
    for x, target in zip(inputs, targets, strict=True):
        loss = cross_entropy(whole(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def gradients_of(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{place}.{name}": one.grad
        for place, part in enumerate(parts)
        for name, one in part.named_parameters()
        if one.grad is not None
    }
