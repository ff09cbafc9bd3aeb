"""Code that all ranks of torch share; they run where asyncpar is not installed, too."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

_PATIENCE = timedelta(seconds=120)


def join(backend: str = "gloo") -> tuple[int, int]:
    """Make the default group of the ranks that meet in the file ``RENDEZVOUS``; return this rank, and how many."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{os.environ['RENDEZVOUS']}"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=_PATIENCE)
    return rank, ranks


def largest(value: float) -> float:
    """Return the maximum over ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor[0])


def leave() -> NoReturn:
    """End the process when all ranks have come here.

    Nothing is taken apart: torch 2.13 now and then hangs for ever where that happens to DistributedDataParallel.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
