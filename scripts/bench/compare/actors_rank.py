"""One rank of ``actors.py``: rank 1 holds the actor, rank 0 calls it by the rules for all libraries; JSON lines."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar as ap
from scripts.bench.peers.actor_rules import (
    Array,
    Subject,
    add_options,
    expected,
    measure,
    print_record,
    resident_bytes,
)

SAMPLES = (0.1, 0.5, 1.0)
"""Shares of a soak after which memory is looked at."""


class Echo(ap.Actor):
    """What is asked."""

    @ap.endpoint
    async def add(self, number: int) -> int:
        return number + 1

    @ap.endpoint
    async def take(self, array: npt.NDArray[np.uint8]) -> int:
        return expected(array)

    @ap.endpoint
    async def resident(self) -> int:
        gc.collect()
        return resident_bytes()


class Ending(ap.Actor):
    """Lets a rank end."""

    def __init__(self, over: asyncio.Event) -> None:
        self._over = over

    @ap.endpoint
    async def come(self) -> None:
        self._over.set()


class Asyncpar(Subject):
    """Calls the actor on rank 1, and one here."""

    def __init__(self, node: ap.Node, remote: Echo, local: Echo) -> None:
        self._node = node
        self._remote = remote
        self._local = local

    async def ask(self, number: int) -> int:
        return await self._remote.add(number)

    async def take(self, array: Array) -> int:
        return await self._remote.take(array)

    async def ask_local(self, number: int) -> int:
        return await self._local.add(number)

    async def spawn_idle(self, count: int) -> None:
        for _ in range(count):
            await self._node.spawn(Echo)


async def soak(subject: Subject, remote: Echo, asks: int) -> None:
    """Ask ``asks`` times, a hundred at a time, and show both processes' memory now and then."""
    done = 0
    for share in SAMPLES:
        count = int(asks * share) - done
        total = await subject.ask_many(count)
        done += count
        gc.collect()
        print_record(
            {
                "figure": "soak",
                "asks": done,
                "caller": resident_bytes(),
                "callee": await remote.resident(),
                "wrong": int(total != count * (count + 1) // 2),
            }
        )


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank."""
    async with ap.init() as node:
        over = asyncio.Event()
        local = await node.spawn(Echo, name="echo")
        await node.spawn(Ending, over, name="ending")
        await node.world.barrier()
        if node.rank == 0:
            remote = node.ref("echo", rank=1, actor_class=Echo)
            subject = Asyncpar(node, remote, local)
            await measure(subject, arguments, print_record)
            if arguments.soak:
                await soak(subject, remote, arguments.soak)
            await node.ref("ending", rank=1, actor_class=Ending).come()
        else:
            await over.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--soak", type=int, default=0)
    options = parser.parse_args()
    ap.run(lambda: work(options))
