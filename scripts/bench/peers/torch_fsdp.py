"""Train the model of ``model_rules.py`` with torch on replicas over Gloo: FSDP2, DDP, or one process alone.

FSDP2 (``fully_shard``) wraps each block and the whole, and frees parameters between forward and backward: ZeRO stage 3.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch_model
from model_rules import from_arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

ALONE, DDP, FSDP = "alone", "ddp", "fsdp"


def _spread(module: torch_model.Stage, form: str) -> Any:
    """Return what trains ``module`` on all replicas."""
    if form == DDP:
        return torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    if form == FSDP:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module


def _summing(model: Any, *, is_last: bool) -> AbstractContextManager[None]:
    """Gradients are exchanged in the last micro-batch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def main() -> None:
    """Be one rank; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--form", choices=(ALONE, DDP, FSDP), required=True)
    arguments = torch_model.parse_arguments(parser)
    rules, rank, ranks = from_arguments(arguments), dist.get_rank(), dist.get_world_size()
    module = torch_model.Stage(rules, range(rules.layers), torch_model.read_values(arguments))
    model = _spread(module, arguments.form)
    optimizer = torch_model.make_optimizer(model.parameters())
    count = arguments.micro_batches

    def step(number: int) -> float:
        tokens, targets = map(torch.from_numpy, rules.batch(number, rank, ranks))
        optimizer.zero_grad()
        total = 0.0
        for index, (x, y) in enumerate(zip(tokens.chunk(count), targets.chunk(count), strict=True)):
            with _summing(model, is_last=index == count - 1):
                loss = torch_model.loss_of(model(x), y) / count
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total / ranks

    torch_model.report(arguments.form if ranks == 1 else f"{arguments.form}{ranks}", rules, step)


if __name__ == "__main__":
    main()
