"""Save plain values, one checkpoint after another, until a kill, at a random byte, ends it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import asyncpar.checkpoint.saving as saving
from asyncpar.checkpoint import PerRank, Saved, latest, save
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.checkpoint.test_values import values
from tests.checkpoint.victim import DeadlyFiles
from tests.checkpoint.worlds import each


def save_step(folder: Path, step: int, node: Node) -> Coroutine[Any, Any, Saved]:
    mine = values(step) | {"own": PerRank(node.rank)}
    return save(folder, mine, step=step, communicator=node.world, keep=2)


async def main(folder: Path, seed: int) -> None:
    last = latest(folder) if folder.exists() else None
    step = 0 if last is None else last.step + 1
    files = DeadlyFiles(Random(seed).randint(1, 4_000_000) + (3_000_000 if last is None else 0))
    vars(saving)["LocalFiles"] = lambda: files
    async with local_world(3) as nodes:
        while True:
            await each(nodes, partial(save_step, folder, step))
            print(step, flush=True)
            step += 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
