"""One rank of ``device.py --without-gpu``: all_reduce over devices that have nothing to do.

What an operation takes on their fabric is asyncpar's own share.
"""

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
from asyncpar.device.fabric import NcclResult
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric

_CALLS = 2000


class IdleCommunicator:
    """Takes every operation, does none of them, and is ready for the next."""

    def __init__(self, *, rank: int, size: int, device: int) -> None:
        self.rank, self.size, self.device = rank, size, device

    def all_reduce(self, *_: Any) -> NcclResult:
        return NcclResult.SUCCESS

    def get_async_error(self) -> NcclResult:
        return NcclResult.SUCCESS

    def get_last_error(self) -> str:
        return ""

    def abort(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class IdleFabric(FakeFabric):
    """One device of one rank that does nothing; events have come as soon as they are recorded."""

    def __init__(self, rank: int) -> None:
        super().__init__(FakeCluster(), visible=[rank])

    def init_rank(self, size: int, unique_id: bytes, rank: int, device: int) -> Any:  # noqa: ARG002
        return IdleCommunicator(rank=rank, size=size, device=device)

    def record_event(self, event: int, stream: int) -> None:
        pass

    def wait_event(self, stream: int, event: int) -> None:
        pass

    def query_event(self, event: int) -> bool:  # noqa: ARG002
        return True


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
