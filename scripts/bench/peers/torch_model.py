"""The transformer of ``model_rules.py`` in torch, and what the programs that train it have in common.

Layers are torch's own where it has them (fused attention, fused AdamW).  Runs in the environment of Gloo; one process
per rank, over a rendezvous file, one thread per rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import model_rules
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch_ranks import join, largest, leave


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self, rules: model_rules.Rules) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model_rules.VOCABULARY, rules.features)
        self.positions = nn.Parameter(torch.zeros(rules.length, rules.features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions[: x.shape[1]]


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalization, each added to its input."""

    def __init__(self, rules: model_rules.Rules) -> None:
        super().__init__()
        features = rules.features
        self.heads = rules.heads
        self.first_norm = nn.LayerNorm(features)
        self.project = nn.Linear(features, 3 * features, bias=False)
        self.output = nn.Linear(features, features)
        self.second_norm = nn.LayerNorm(features)
        self.widen = nn.Linear(features, 4 * features)
        self.narrow = nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.output(self._attend(self.project(self.first_norm(x))))
        return x + self.narrow(functional.gelu(self.widen(self.second_norm(x)), approximate="tanh"))

    def _attend(self, projected: torch.Tensor) -> torch.Tensor:
        batch, length, _ = projected.shape
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Stage(nn.Module):
    """The blocks ``layers`` of the model; the first stage embeds, the last one makes logits."""

    def __init__(self, rules: model_rules.Rules, layers: range, values: dict[str, np.ndarray[Any, Any]]) -> None:
        super().__init__()
        self.embedding = Embedding(rules) if layers.start == 0 else None
        self.blocks = nn.ModuleList(Block(rules) for _ in layers)
        is_last = layers.stop == rules.layers
        self.norm = nn.LayerNorm(rules.features) if is_last else None
        self.head = nn.Linear(rules.features, model_rules.VOCABULARY, bias=False) if is_last else None
        with torch.no_grad():
            for name, parameter in self._named_as_ours(layers):
                given = torch.from_numpy(values[name])
                parameter.copy_(given.T if parameter.shape != given.shape else _upright(name, given))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None else self.head(self.norm(x))

    def _named_as_ours(self, layers: range) -> Iterable[tuple[str, nn.Parameter]]:
        if self.embedding is not None:
            yield "embedding/tokens", self.embedding.tokens.weight
            yield "embedding/positions", self.embedding.positions
        for index, block in zip(layers, self.blocks, strict=True):
            for ours, theirs in _BLOCK.items():
                yield f"block{index}/{ours}", block.get_parameter(theirs)
        if self.norm is not None:
            yield "norm/scale", self.norm.weight
            yield "norm/shift", self.norm.bias
            yield "head/weight", self.head.weight


_BLOCK = {
    "first_norm/scale": "first_norm.weight",
    "first_norm/shift": "first_norm.bias",
    "attention/project/weight": "project.weight",
    "attention/output/weight": "output.weight",
    "attention/output/bias": "output.bias",
    "second_norm/scale": "second_norm.weight",
    "second_norm/shift": "second_norm.bias",
    "mlp/widen/weight": "widen.weight",
    "mlp/widen/bias": "widen.bias",
    "mlp/narrow/weight": "narrow.weight",
    "mlp/narrow/bias": "narrow.bias",
}


def _upright(name: str, given: torch.Tensor) -> torch.Tensor:
    """Our weights have shape (inputs, outputs), torch's the other way round; square ones do not show it."""
    return given.T if name.endswith("/weight") else given


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW without decay, in one kernel."""
    return torch.optim.AdamW(
        parameters,
        lr=model_rules.LEARNING_RATE,
        betas=model_rules.BETAS,
        eps=model_rules.EPSILON,
        weight_decay=0.0,
        fused=True,
    )


def parse_arguments(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Return the options, those of ``parser`` and of the sizes among them, and join the other ranks."""
    parser = parser or argparse.ArgumentParser()
    model_rules.add_options(parser)
    parser.add_argument("--values", required=True, help="npz file of first values, by our names")
    parser.add_argument("--micro-batches", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join()
    return arguments


def read_values(arguments: argparse.Namespace) -> dict[str, np.ndarray[Any, Any]]:
    """Return the first values by name."""
    with np.load(arguments.values) as stored:
        return dict(stored)


def report(layout: str, rules: model_rules.Rules, step: Callable[[int], float]) -> None:
    """Take all steps and end the process; rank 0 prints the median of the slowest rank and the losses.

    ``step`` takes the number of a step and returns this rank's loss, 0 where it has none.
    """
    seconds, losses = [], []
    for number in range(rules.total_steps):
        dist.barrier()
        started = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - started)
    slowest = largest(statistics.median(seconds[model_rules.WARM_UP :]))
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        record = {"what": "train", "side": "torch", "layout": layout, "seconds": slowest, "losses": total.tolist()}
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
    leave()
