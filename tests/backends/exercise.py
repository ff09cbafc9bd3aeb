"""Show in one process of a world that a backend works: ``python -m tests.backends.exercise BACKEND ...``.

Rank 0 prints what it found, as JSON, in the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.backends import BackendConfig, CommunicationRuntime, CompressionAlgorithm


async def work(backend: str, config: BackendConfig) -> dict[str, Any]:
    """Use everything once, twice over: a runtime can be opened again."""
    found: dict[str, Any] = {"sums": []}
    async with CommunicationRuntime() as runtime:
        for _ in range(2):
            group = await runtime.initialize(backend, config)
            result = await runtime.collective_op("all_reduce", np.full(100_000, 1.0 + group.rank))
            assert result.value is not None
            found["sums"].append(float(result.value[-1]))
            found["lane"] = group.communicator._engine.table.links.lane_kind(1 - group.rank)  # noqa: SLF001  # users are not told the kind of lane; the communicator of a backend has no node
            await runtime.finalize()
        group = await runtime.initialize(backend, config)
        alone = runtime.create_group("first", [0])
        if alone is not None:
            found["alone"] = alone.size
        left = await _barrier_that_rank_0_leaves(group.communicator)
        found["cancelled_by"] = await group.communicator.all_gather_object(left, key="after")
        found["bytes"] = runtime.get_metrics().of("all_reduce").bytes
    return found


async def _barrier_that_rank_0_leaves(comm: ap.Communicator) -> int | None:
    """Return which rank cancelled a barrier.  Rank 1 comes once rank 0 has left: it could be complete otherwise."""
    if comm.rank == 1:
        await comm.recv_object(0)
        try:
            await comm.barrier()
        except ap.PeerCancelled as error:
            return error.rank
        return None
    try:
        async with asyncio.timeout(0):
            await comm.barrier()
    except TimeoutError:
        await comm.send_object("left", 1)
        return 0
    return None


async def lose(backend: str, config: BackendConfig, *, how: str) -> dict[str, Any]:
    """Rank 1 ends while rank 0 waits for it."""
    async with CommunicationRuntime() as runtime:
        group = await runtime.initialize(backend, config)
        if group.rank == 1:
            await group.communicator.recv_object(0)
            if how == "hang":
                time.sleep(3)  # noqa: ASYNC251  # what a rank that hangs does to its loop
            if how == "die":
                os._exit(3)
            return {}
        await group.communicator.send_object("now", 1)
        group.communicator.timeout = 1.0
        started = time.perf_counter()
        try:
            await group.communicator.all_reduce(np.ones(1 << 20))
        except ap.PeerLost as error:
            return {"lost": error.rank, "cause": error.cause, "seconds": time.perf_counter() - started}
        except ap.PeerTimeout as error:
            return {"lost": None, "late": error.rank}
        return {"lost": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("what", choices=["work", "leave", "die", "hang"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--rendezvous")
    arguments = parser.parse_args()
    config = BackendConfig(
        rank=arguments.rank,
        world_size=arguments.size,
        rendezvous=arguments.rendezvous,
        compression=CompressionAlgorithm.none(),
    )
    if arguments.what == "work":
        found = ap.run(work(arguments.backend, config))
    else:
        found = ap.run(lose(arguments.backend, config, how=arguments.what))
    if found.get("alone") or "lost" in found:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
