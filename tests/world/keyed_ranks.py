"""Program of the rank processes of test_keyed_world: operations with keys, each rank in its own order."""

from __future__ import annotations

import asyncio
import json
import random
import sys

import numpy as np

import asyncpar as ap

COUNTS = (1, 1, 1, 2000, 90_000, 400_000)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def reduce_in_any_order(node: ap.Node, steps: int, counts: tuple[int, ...]) -> None:
    """Reduce all keys of a step at once, some a little later than others, now and then without polling."""
    comm = node.world
    comm.timeout = None  # a rank that is killed is noticed, not missed
    arena = comm._engine.table.arena  # noqa: SLF001  # a process of its own, which imports no tests; the arena's driver is not public
    assert arena is not None
    chance = random.Random(comm.rank)
    most_polls = arena.driver._most_polls  # noqa: SLF001  # how often a rank polls is no setting while it runs, and both ways are to be mixed
    total = sum(range(comm.size))

    async def reduce(key: int) -> None:
        for _ in range(chance.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        x = np.full(counts[key], float(key + comm.rank), np.float32)
        await comm.all_reduce(x, key=f"{key}")
        assert (x == comm.size * key + total).all(), key

    for step in range(steps):
        arena.driver._polls = arena.driver._most_polls = most_polls if step % 4 else 0  # noqa: SLF001  # how often a rank polls is no setting while it runs, and both ways are to be mixed
        keys = list(range(len(counts)))
        chance.shuffle(keys)
        await asyncio.gather(*(reduce(key) for key in keys))
        if step == 3:
            say(ready=True)
    say(rescues=arena.driver.rescues, algorithms=[entry.algorithm for entry in comm.traffic.operations])


async def main() -> None:
    async with ap.init() as node:
        try:
            await reduce_in_any_order(node, int(sys.argv[1]), COUNTS if sys.argv[2] == "all" else COUNTS[:3])
        except ap.PeerLost as error:
            say(blamed=error.rank)


ap.run(main)
