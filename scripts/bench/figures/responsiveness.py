"""Measure the delay of a 1 ms timer in the event loop in which large all-reduces run.

    scripts/bench/run responsiveness --nproc 2 --size 100MB --seconds 5 [--transport tcp]

Each rank reduces without a pause, and a second task sleeps for 1 ms again and again and notes by how much it woke too
late.  Printed are the median, the 99th percentile and the maximum over all ranks, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

import numpy as np

import asyncpar as ap
from asyncpar.bench.sizes import parse_size

INTERVAL = 1e-3


async def watch(lateness: list[float]) -> None:
    """Sleep, and note how much too long each sleep was."""
    while True:
        due = time.perf_counter() + INTERVAL
        await asyncio.sleep(INTERVAL)
        lateness.append(time.perf_counter() - due)


async def measure(size: int, seconds: float) -> None:
    """Be one rank."""
    async with ap.init() as node:
        comm = node.world
        x = np.zeros(size // 4, np.float32)
        await comm.all_reduce(x)
        await comm.barrier()
        lateness: list[float] = []
        watching = asyncio.create_task(watch(lateness))
        rounds = 0
        end = time.perf_counter() + seconds
        goes_on = np.ones(1, np.int32)
        while goes_on[0]:
            await comm.all_reduce(x)
            rounds += 1
            goes_on[0] = time.perf_counter() < end
            await comm.broadcast(goes_on)
        watching.cancel()
        everything = await comm.all_gather_v(np.array(lateness))
        if node.rank == 0:
            median, late = (1e3 * float(np.percentile(everything, share)) for share in (50, 99))
            print(
                f"{comm.size} ranks, {size} bytes, {rounds} all-reduces, {len(everything)} timers: late by "
                f"{median:.2f} ms (median), {late:.2f} ms (p99), {1e3 * everything.max():.2f} ms (max)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks")
    parser.add_argument("--size", default="100MB", help="bytes of each all-reduce: 64K, 25MB, ...")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure")
    parser.add_argument("--transport", help="pin the lane: shm, tcp or grpc")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        size = parse_size("--size", arguments.size)
    except ap.UsageError as error:
        parser.error(str(error))
    if arguments.rank:
        ap.run(measure(size, arguments.seconds))
        return 0
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(arguments.nproc)]
    if arguments.transport:
        command += ["--transport", arguments.transport]
    command += [__file__, "--rank", "--size", arguments.size, "--seconds", str(arguments.seconds)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
