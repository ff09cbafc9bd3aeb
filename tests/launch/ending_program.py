"""Program of the matrix of endings: it gets to a place, says so, and stays there until it may go on.

Started as a file (``ending_program.py PLACE``), or called by an engine (``stay``, or ``drive`` in the caller).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

import numpy as np

import asyncpar as ap


def arrive() -> None:
    """Leave a note that this rank is where it shall be."""
    name = f"at-{os.environ.get('RANK', '0')}"
    with open(f"new-{name}", "w") as note:
        note.write(str(os.getpid()))
    os.rename(f"new-{name}", name)


def may_go_on() -> bool:
    """Whether a C call, a thread or a loop of Python may return: it gets no signal, so it is let go after one."""
    return os.path.exists("go")


async def last() -> None:
    """Stay where a signal acts, until the test is content with a rank that got none."""
    while not os.path.exists("end"):  # noqa: ASYNC110  # that comes from another process
        await asyncio.sleep(0.01)


def compute_in_python() -> None:
    while not may_go_on():
        pass


def call_without_the_lock() -> None:
    while not may_go_on():
        time.sleep(0.2)


def call_with_the_lock() -> None:
    while not may_go_on():
        sum(range(5_000_000))


BLOCKING: dict[str, Callable[[], None]] = {
    "python": compute_in_python,
    "C call": call_without_the_lock,
    "C call with the lock": call_with_the_lock,
}


async def reduce_until_the_end(node: ap.Node) -> None:
    """Be in a collective almost always: the last rank comes late to each of them."""
    ends = np.zeros(1)
    while not ends[0]:
        ends[0] = os.path.exists("end")
        if node.size > 1 and node.rank == node.size - 1:
            await asyncio.sleep(0.02)
        await node.world.all_reduce(ends, "max")


async def stay(place: str) -> str:
    """Go to ``place``, and stay there."""
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if place == "forming":
        arrive()
        if rank == size - 1:
            await last()
    async with ap.init() as node:
        await node.world.barrier()
        if place not in ("forming", "ending"):
            arrive()
        if place == "collective":
            await reduce_until_the_end(node)
        elif place == "thread":
            await asyncio.to_thread(call_without_the_lock)
            await last()
        elif place in BLOCKING:
            BLOCKING[place]()
            await last()
    if place == "ending":
        arrive()
        await last()
    return "well"


if __name__ == "__main__":
    ap.run(stay(sys.argv[1]))
