"""Program of the rank processes of test_silent_rank: operations until one rank is stopped."""

from __future__ import annotations

import json
import sys

import numpy as np

import asyncpar as ap


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def work(comm: ap.Communicator, what: str) -> None:
    small, large = np.ones(8, np.float32), np.ones(400_000, np.float32)
    for step in range(1_000_000_000):
        match what:
            case "small":
                await comm.all_reduce(small, op="max")
            case "large":
                await comm.all_reduce(large, op="max")
            case "keyed":
                await comm.all_reduce(large, op="max", key="a")
            case "mixed":
                await comm.all_gather(small)
                await comm.broadcast(large, root=step % comm.size)
                await comm.reduce(small.copy(), root=step % comm.size, op="max")
                await comm.barrier()
        if step == 5:
            say(ready=True)


async def main() -> None:
    async with ap.init() as node:
        node.world.timeout = float(sys.argv[2])
        try:
            await work(node.world, sys.argv[1])
        except ap.PeerError as error:
            say(blamed=error.rank, kind=type(error).__name__, message=str(error))


ap.run(main)
