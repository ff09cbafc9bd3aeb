"""Program of the rank processes of test_arena_world."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import numpy as np

import asyncpar as ap


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def reduce_all_sorts(node: ap.Node) -> None:
    """Reduce small and large arrays, some of them in the arena's heap, until somebody is lost."""
    comm = node.world
    arrays = [np.empty(1, np.float32), np.empty(300_000, np.float32), node.empty(1_000_000)]
    for step in range(1_000_000_000):
        x = arrays[step % len(arrays)]
        x[:] = 1
        await comm.all_reduce(x)
        assert (x == comm.size).all()
        if step == len(arrays):
            say(ready=True, has_arena=node.has_arena)


async def reduce_often(node: ap.Node, polling: int, sleeping: int) -> None:
    """Make small all-reduces with pauses of random length between them, at last without polling at all."""
    comm = node.world
    arena = comm._engine.table.arena  # noqa: SLF001  # a process of its own, which imports no tests; the arena's driver is not public
    assert arena is not None
    chance = random.Random(comm.rank)
    x = np.zeros(1, np.int64)
    total = comm.size * (comm.size - 1) // 2
    for number in range(polling + sleeping):
        if number == polling:
            arena.driver._polls = arena.driver._most_polls = 0  # noqa: SLF001  # without polling every wait sleeps: how often a rank polls is no setting while it runs
        pause = chance.random()
        if pause < 0.01:
            await asyncio.sleep(0)
        elif pause < 0.02:
            end = time.perf_counter() + chance.random() * 1e-4
            while time.perf_counter() < end:
                pass
        x[0] = number + comm.rank
        await comm.all_reduce(x)
        assert x[0] == comm.size * number + total, number
    say(done=polling + sleeping, rescues=arena.driver.rescues, rings=arena.driver._rings)  # noqa: SLF001  # how often a bell rang is counted nowhere else


async def main() -> None:
    async with ap.init() as node:
        try:
            if sys.argv[1] == "often":
                await reduce_often(node, *map(int, sys.argv[2:]))
            else:
                await reduce_all_sorts(node)
        except ap.PeerLost as error:
            say(blamed=error.rank)


ap.run(main)
