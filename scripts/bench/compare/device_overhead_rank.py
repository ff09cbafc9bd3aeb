"""One rank of ``device.py --without-gpu``: all_reduce over devices that have nothing to do."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar as ap
from asyncpar.collectives.device.host import use_fabric
from asyncpar.testing.fake_devices import FakeDeviceArray
from scripts.bench.compare.idle_fabric import IdleFabric

_CALLS = 2000


async def measure(comm: Any, call: Callable[[], Awaitable[object]]) -> float:
    """Return the median seconds of a call on the slowest rank."""
    for _ in range(_CALLS // 10):
        await call()
    seconds = []
    for _ in range(_CALLS):
        begun = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - begun)
    slowest = np.array([statistics.median(seconds)])
    await comm.all_reduce(slowest, op="max")
    return float(slowest[0])


async def main(rounds: int) -> None:
    """Be one rank."""
    async with ap.init() as node:
        comm: Any = node.world
        fabric = IdleFabric(comm.rank)
        use_fabric(comm._engine.table, fabric)  # before the first device array
        x = FakeDeviceArray.of(fabric.cluster, np.ones(1, np.float32))
        on_host = np.ones(1, np.float32)
        stream = fabric.create_stream(0)
        alone = comm.subgroup([comm.rank])
        sides: dict[str, Callable[[], Awaitable[object]]] = {
            "awaited": lambda: comm.all_reduce(x),
            "stream=": lambda: comm.all_reduce(x, stream=stream),
            "one rank": lambda: alone.all_reduce(x),
            "numpy": lambda: comm.all_reduce(on_host),
        }
        for _ in range(rounds):
            for side, call in sides.items():
                seconds = await measure(comm, call)
                if node.rank == 0:
                    print(json.dumps({"what": "overhead", "side": side, "seconds": seconds}), flush=True)
        fabric.destroy_stream(stream)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    ap.run(main(parser.parse_args().rounds))
