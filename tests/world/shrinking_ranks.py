"""A rank that reduces in several ways at once, and goes on with the survivors after each loss, in the same world."""

import asyncio
import json
import os
import time
from typing import Any

import numpy as np

import asyncpar as ap

SECONDS = 30.0


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


async def step(comm: ap.Communicator, heap: np.ndarray, number: int) -> None:
    """Operations of all kinds, two at a time; every sum that comes is right."""
    small, large = np.ones(5), np.ones(200_000)
    heap[:] = 1
    calls = [
        comm.all_reduce(small),
        comm.all_reduce(heap),
        comm.all_reduce(large, key="large"),
        comm.all_gather_object({"rank": comm.rank}),
        comm.all_reduce(np.ones(30_000), algorithm="ring"),
    ]
    results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert (small == comm.size).all()
    assert (heap == comm.size).all()
    assert (large == comm.size).all()
    assert len(results[3]) == comm.size, number


async def main() -> None:
    async with ap.init() as node:
        comm: ap.Communicator = node.world
        heap = node.empty(100_000, np.float64)
        await step(comm, heap, 0)
        say({"ranks": comm.ranks, "steps": 0, "pid": os.getpid()})
        end, number = time.monotonic() + SECONDS, 0
        while comm.size > 1 and time.monotonic() < end:
            try:
                number += 1
                await step(comm, heap, number)
            except ap.PeerError as error:
                comm.revoke(error)
                comm = await comm.shrink()
                agreed = await comm.agree(~(1 << 40) if comm.rank == 0 else -1)
                heap = node.empty(100_000, np.float64)
                arena = "arena" in comm.algorithms("all_reduce")
                say({"ranks": comm.ranks, "flag": agreed.flag, "lost": agreed.lost, "arena": arena})


ap.run(main)
