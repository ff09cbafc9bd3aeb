"""One rank of device.py: all_reduce by each side in turn, every result checked."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from nccl import core as nccl

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar as ap
from scripts.bench.figures.responsiveness import watch

_BUDGET = 0.3
_LEAST, _MOST = 5, 200

Reduce = Callable[[torch.Tensor], Awaitable[object]]


async def connect(comm: Any, device: torch.device) -> dict[str, Reduce]:
    """Return what reduces a tensor in place and waits for it, by side."""
    port = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    port = await comm.broadcast_object(port, root=0)
    store = f"tcp://127.0.0.1:{port}"
    await asyncio.to_thread(
        dist.init_process_group, "nccl", init_method=store, rank=comm.rank, world_size=comm.size, device_id=device
    )
    unique = bytes(nccl.get_unique_id().as_bytes) if comm.rank == 0 else None
    unique = await comm.broadcast_object(unique, root=0)
    torch.cuda.set_device(device)
    bare = nccl.Communicator.init(comm.size, comm.rank, nccl.UniqueId.from_bytes(unique))
    stream = torch.cuda.Stream(device)

    async def by_asyncpar(x: torch.Tensor) -> None:
        await comm.all_reduce(x)

    async def by_torch(x: torch.Tensor) -> None:
        dist.all_reduce(x)
        torch.cuda.synchronize(device)

    async def by_nccl(x: torch.Tensor) -> None:
        bare.allreduce(x, x, nccl.SUM, stream=stream.cuda_stream)
        stream.synchronize()

    return {"asyncpar": by_asyncpar, "torch": by_torch, "bare": by_nccl}


async def measure(comm: Any, reduce: Reduce, x: torch.Tensor) -> float:
    """Return the median seconds of an operation on the slowest rank."""
    x.fill_(1.0)
    torch.cuda.synchronize(x.device)
    await reduce(x)
    if not bool((x == comm.size).all()):
        raise SystemExit(f"rank {comm.rank}: the sum of ones is wrong")
    x.zero_()
    torch.cuda.synchronize(x.device)
    begun = time.perf_counter()
    await reduce(x)
    guess = np.array([time.perf_counter() - begun])
    await comm.all_reduce(guess, op="max")
    seconds = []
    for _ in range(max(_LEAST, min(_MOST, int(_BUDGET / guess[0])))):
        begun = time.perf_counter()
        await reduce(x)
        seconds.append(time.perf_counter() - begun)
    slowest = np.array([statistics.median(seconds)])
    await comm.all_reduce(slowest, op="max")
    return float(slowest[0])


async def main(sizes: list[int], rounds: int) -> None:
    """Be one rank."""
    async with ap.init() as node:
        comm = node.world
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        sides = await connect(comm, device)
        lateness: list[float] = []
        for size in sizes:
            x = torch.zeros(max(1, size // 4), device=device)
            for _ in range(rounds):
                for name, reduce in sides.items():
                    watching = asyncio.create_task(watch(lateness if name == "asyncpar" else []))
                    seconds = await measure(comm, reduce, x)
                    watching.cancel()
                    if node.rank == 0:
                        print(json.dumps({"what": "time", "size": size, "side": name, "seconds": seconds}), flush=True)
            del x
        late = np.array([float(np.percentile(lateness, 99)) if lateness else 0.0])
        await comm.all_reduce(late, op="max")
        if node.rank == 0:
            print(json.dumps({"what": "lateness", "p99": float(late[0])}), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    ap.run(main([int(size) for size in options.sizes.split(",")], options.rounds))
