"""Program of the rank processes of test_silent_rank: operations of some kinds at once until one rank is stopped."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

import asyncpar as ap

STEPS = 5
"""Operations of each kind that have been done when a rank is ready to be stopped."""


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def work(comm: ap.Communicator, what: str, has_begun: asyncio.Event) -> None:
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
        if step == STEPS:
            has_begun.set()


async def blamed(comm: ap.Communicator, what: str, has_begun: asyncio.Event) -> int | None:
    """Work until it fails, and return the rank of the world that the error names."""
    try:
        await work(comm, what, has_begun)
    except ap.PeerError as error:
        return error.rank
    return None


async def main() -> None:
    async with ap.init() as node:
        kinds = sys.argv[2:]
        begun = [asyncio.Event() for _ in kinds]
        tasks = []
        for what, has_begun in zip(kinds, begun, strict=True):
            group = node.world.subgroup(node.world.ranks, key=what)
            assert group is not None
            group.timeout = float(sys.argv[1])
            tasks.append(asyncio.create_task(blamed(group, what, has_begun)))
        for has_begun in begun:
            await has_begun.wait()
        say(ready=True)
        say(blamed=dict(zip(kinds, await asyncio.gather(*tasks), strict=True)))


ap.run(main)
