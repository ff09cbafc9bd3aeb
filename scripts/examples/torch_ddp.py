"""Train a small torch model with DistributedDataParallel, or FSDP2, on asyncpar.

torchrun --nproc-per-node 2 scripts/examples/torch_ddp.py
asyncpar launch --nproc-per-node 2 scripts/examples/torch_ddp.py --codec int8

Nothing here is asyncpar's but the name of the backend, and the communication hook of --codec.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

try:
    import asyncpar.torch
except ModuleNotFoundError as error:
    sys.exit(f"torch_ddp: {error}")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from asyncpar.codecs import parse_codec
from asyncpar.errors import UsageError

FEATURES = 256
SAMPLES = 4096


def main() -> int:
    """Train, and return the exit status: that of Ctrl-C if it was that."""
    options = _options()
    try:
        _run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(options.backend)
    try:
        model = _model()
        whole = _wrap(model, options)
        loss, seconds = _train(whole, options)
        total = torch.tensor([loss])
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, {options.steps} steps in {seconds:.2f} s, loss {total.item():.6f}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _wrap(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    if options.fsdp:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    parallel = DistributedDataParallel(model)
    if options.codec is not None:
        state = asyncpar.torch.GradientHook(codec=options.codec)
        parallel.register_comm_hook(state, asyncpar.torch.gradient_hook)
    return parallel


def _train(model: nn.Module, options: argparse.Namespace) -> tuple[float, float]:
    """Return the loss of the last step on this rank's samples, and the seconds that training took."""
    inputs, targets = _samples(dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    loss: Any = torch.tensor(0.0)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item(), time.perf_counter() - started


def _samples(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the samples: the same ones in all, however many ranks there are."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, 1, generator=generator)
    return inputs[rank::size], torch.tanh(inputs @ teacher)[rank::size]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="asyncpar", help="backend of torch.distributed (default: asyncpar)")
    parser.add_argument("--steps", type=int, default=50, help="steps to train (default: 50)")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters with FSDP2 instead of DDP")
    parser.add_argument("--codec", help="compress DDP's gradients, with int8 for example")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: expected at least 1, got {options.steps}")
    if options.codec is not None and (options.fsdp or options.backend != "asyncpar"):
        parser.error("--codec: expected DDP on asyncpar, without --fsdp or another --backend")
    if options.backend not in dist.Backend.backend_list:
        parser.error(f"--backend: expected one of {', '.join(dist.Backend.backend_list[1:])}, got {options.backend}")
    if options.codec is not None:
        try:
            parse_codec(options.codec)
        except UsageError as error:
            parser.error(f"--codec: {error}")
    if "RANK" not in os.environ:
        sys.exit("torch_ddp: start it with: torchrun --nproc-per-node 2 torch_ddp.py, or asyncpar launch")
    return options


if __name__ == "__main__":
    sys.exit(main())
