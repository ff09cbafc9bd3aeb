"""Program of the rank processes of test_killed_rank: reduce until the end, and print when and how it came."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

import asyncpar as ap


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def reduce_for_ever(comm: ap.Communicator, count: int) -> None:
    x = np.ones(count, np.float32)
    for step in range(1_000_000_000):
        x[:] = 1
        await comm.all_reduce(x)
        assert x[0] == comm.size
        if step == 3:
            say(ready=True)


async def wait_for_the_last_rank(comm: ap.Communicator) -> None:
    await comm.barrier()
    say(ready=True)
    if comm.rank == comm.size - 1:
        await asyncio.get_running_loop().create_future()
    await comm.barrier()


async def main() -> None:
    async with ap.init() as node:
        node.world.timeout = None
        try:
            if sys.argv[1] == "wait":
                await wait_for_the_last_rank(node.world)
            else:
                await reduce_for_ever(node.world, int(sys.argv[1]))
        except ap.PeerLost as error:
            say(blamed=error.rank, operation=error.operation, message=str(error))


ap.run(main)
