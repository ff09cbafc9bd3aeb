"""Time all_reduce_many against one array of the same size, and against a call for each array.

    scripts/bench/run many --nproc 2 --arrays 200 --size 4096

Real processes on this host, medians of the slowest rank.  The three take turns, so that all meet the same noise.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import asyncpar as ap

ROUNDS = 10
SECONDS_PER_ROUND = 0.05

Call = Callable[[], Awaitable[Any]]


async def run_all(comm: ap.Communicator, arrays: int, size: int) -> dict[str, float]:
    """Return the median seconds of each way to reduce ``arrays`` arrays of ``size`` bytes."""
    many = [np.zeros(max(size // 4, 1), np.float32) for _ in range(arrays)]
    whole = np.zeros(sum(array.size for array in many), np.float32)

    async def one_by_one() -> None:
        for array in many:
            await comm.all_reduce(array)

    ways: dict[str, Call] = {
        "all_reduce of one array": lambda: comm.all_reduce(whole),
        "all_reduce_many": lambda: comm.all_reduce_many(many),
        "all_reduce of each": one_by_one,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            times[name] += await iterate(comm, call)
    medians = np.array([statistics.median(times[name]) for name in ways])
    await comm.all_reduce(medians, op="max")
    return dict(zip(ways, medians.tolist(), strict=True))


async def iterate(comm: ap.Communicator, call: Call) -> list[float]:
    """Time ``call`` for a while, as often on all ranks."""
    await call()
    once = np.array([time.perf_counter()])
    await call()
    once[0] = time.perf_counter() - once[0]
    await comm.all_reduce(once, op="max")
    times = []
    for _ in range(int(min(max(SECONDS_PER_ROUND / once[0], 3), 500))):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return times


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints the table."""
    async with ap.init() as node:
        medians = await run_all(node.world, arguments.arrays, arguments.size)
        if node.rank == 0:
            base = next(iter(medians.values()))
            print(
                f"# {arguments.arrays} float32 arrays of {arguments.size} B, {node.size} ranks, arena: {node.has_arena}"
            )
            for name, seconds in medians.items():
                print(f"{name:<26} {seconds * 1e6:>10.1f} us {seconds / base:>8.2f}x")
        await node.world.barrier()


def main() -> int:
    """Launch the job, or be a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--transport", help="tcp or grpc instead of what is best")
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--size", type=int, default=4096, help="bytes of each array")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        ap.run(lambda: work(arguments))
        return 0
    launch = [sys.executable, "-m", "asyncpar", "launch", f"--nproc-per-node={arguments.nproc}"]
    if arguments.transport:
        launch.append(f"--transport={arguments.transport}")
    passed = [f"--arrays={arguments.arrays}", f"--size={arguments.size}", "--worker"]
    return subprocess.run([*launch, str(Path(__file__)), *passed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
