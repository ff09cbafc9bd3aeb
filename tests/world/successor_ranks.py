"""A rank that reduces until another one is lost, and then forms the next world with the survivors."""

import asyncio
import json
import os
import sys
from dataclasses import replace

import numpy as np

import asyncpar as ap
from asyncpar.core.config.environment import LaunchEnvironment


async def main() -> None:
    environment = LaunchEnvironment.from_mapping(os.environ)
    assert environment is not None
    node = await ap.Node.start(environment)
    comm = node.world
    comm.timeout = float(sys.argv[1])
    x = np.ones(100_000)
    await comm.all_reduce(x)
    print(json.dumps("ready"), flush=True)
    try:
        while True:
            await comm.all_reduce(x)
            await asyncio.sleep(0)
    except ap.PeerError as error:
        comm.revoke(error)
    left = await comm.shrink()
    await node.stop()
    successor = replace(
        environment,
        rank=left.rank,
        local_rank=left.rank,
        world_size=left.size,
        local_world_size=left.size,
        generation=1,
    )
    node = await ap.Node.start(successor)
    total = await node.world.all_reduce(np.ones(3))
    stale = ""
    try:
        await comm.all_reduce(x)
    except ap.AsyncparError as error:
        stale = type(error).__name__
    told = {"rank": left.rank, "size": node.size, "sum": float(total[0]), "stale": stale}
    print(json.dumps(told), flush=True)
    await node.stop()


ap.run(main)
