"""Rank 2 is stopped amid its sums; the others form the next world, and go on there for a while when it wakes."""

import asyncio
import json
import os
import time
from dataclasses import replace

import numpy as np

import asyncpar as ap
from asyncpar.core.config.environment import LaunchEnvironment

SECONDS = 0.7


def say(text: str) -> None:
    print(json.dumps(text), flush=True)


async def main() -> None:
    environment = LaunchEnvironment.from_mapping(os.environ)
    assert environment is not None
    node = await ap.Node.start(environment)
    comm = node.world
    shared = comm.empty(300_000)
    shared[:] = 1
    await comm.all_reduce(shared)
    comm.timeout = 2.0
    say("ready")
    try:
        while True:
            for x in (np.ones(50), shared, np.ones(1_000_000)):
                x[:] = 1
                await comm.all_reduce(x)
                assert (x == comm.size).all(), "a sum of ranks that were there"
            await asyncio.sleep(0)
    except ap.PeerError as error:
        if environment.rank == 2:
            say(type(error).__name__)
            await node.stop()
            return
        comm.revoke(error)
    left = await comm.shrink()
    shared[:] = 7  # a rank that still reads it must not take the result for one
    await node.stop()
    successor = replace(
        environment,
        rank=left.rank,
        local_rank=left.rank,
        world_size=left.size,
        local_world_size=left.size,
        generation=1,
    )
    async with asyncio.timeout(20):
        node = await ap.Node.start(successor)
    say("in the next world")
    end, flag = time.monotonic() + SECONDS, np.ones(1)
    while flag[0]:
        for count in (50, 1_000_000):
            x = np.ones(count)
            await node.world.all_reduce(x)
            assert (x == node.size).all()
        flag[0] = time.monotonic() < end
        await node.world.broadcast(flag)
    say("all sums were right")
    await node.stop()


ap.run(main)
