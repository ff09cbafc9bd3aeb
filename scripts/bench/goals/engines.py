"""Measure how long engines take until four ranks have met.

    scripts/bench/run engines --rounds 5

The figure is the whole call, from the caller back to the caller, with one collective in it.  A Dask cluster of four
workers on this machine runs before the clock does; its first call, in which workers import asyncpar, is shown apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import asyncpar as ap

RANKS = 4


async def meet() -> int:
    """Join the world, and wait for all ranks."""
    async with ap.init() as node:
        await node.world.barrier()
        return node.rank


def measure(call: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Return the seconds of the first call, and of the others their median and range."""
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    first, *others = (round(each, 3) for each in seconds)
    return {"first": first, "median": statistics.median(others), "least": min(others), "most": max(others)}


async def open_world(client: Any) -> None:
    """Open a mesh on Dask's workers, and close it."""
    async with ap.dask.world(client) as mesh:
        assert len(mesh) == RANKS


def main() -> None:
    """Measure all engines that are installed, and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    local = measure(lambda: ap.cluster.run(meet, ranks=RANKS), rounds)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # ranks are children, and were waited for
    cpu = round((used.ru_utime + used.ru_stime) / (rounds + 1), 2)
    print(json.dumps({"engine": "local", "load": os.getloadavg()[0], "cpu_of_ranks": cpu, **local}), flush=True)
    from distributed import Client

    with Client(n_workers=RANKS, threads_per_worker=1, dashboard_address="127.0.0.1:0") as client:
        dask = measure(lambda: ap.dask.run(client, meet, ranks=RANKS), rounds)
        print(json.dumps({"engine": "dask", "load": os.getloadavg()[0], **dask}), flush=True)
        world = measure(lambda: asyncio.run(open_world(client)), rounds)
        print(json.dumps({"engine": "dask world", "load": os.getloadavg()[0], **world}), flush=True)


if __name__ == "__main__":
    main()
