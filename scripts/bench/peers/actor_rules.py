"""The rules by which every actor library is measured, asyncpar among them (see ``actors.py``).

Runs in the peers' environments, where asyncpar is not installed: numpy and the standard library only.

The caller and the actor are two processes of this host.  Every answer is compared with what it must be.  ``ask``: one
call after the other.  ``concurrent``: as many calls as can be made while ``IN_FLIGHT`` of them are under way, and
``concurrent 1000`` while so many are.  ``first``: the first calls of the pair with an array of ``FIRST_BYTES``, and
later ones beside them; it comes before all other arrays.
``array``: one call after the other with an array as argument, which the actor reads at both ends.  ``local``: an actor
in the caller's process.  ``idle``: how much the caller's process grows by actors that do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

IN_FLIGHT = 100
MANY = "concurrent "
"""What the names of figures with another number of calls under way begin with; the number follows."""

FIRST_BYTES = 64_000_000
FIRST_CALLS = 5
LEAST_CALLS = 10
WARM_UP = 0.3
"""Share of the budget."""

Array = np.ndarray[Any, np.dtype[np.uint8]]
Record = dict[str, object]


class Subject(ABC):
    """A library with an actor in another process, as its caller sees it."""

    has_local = True
    """Can actors live in the caller's process?"""
    has_idle = True
    """Can many?"""

    @abstractmethod
    async def ask(self, number: int) -> int:
        """Let the actor add 1."""

    @abstractmethod
    async def take(self, array: Array) -> int:
        """Let the actor return what ``expected`` says."""

    async def ask_many(self, count: int, in_flight: int = IN_FLIGHT) -> int:
        """Ask for 0, 1, ... with ``in_flight`` under way and return the sum of the answers."""
        numbers = iter(range(count))

        async def work() -> int:
            total = 0
            for number in numbers:
                total += await self.ask(number)
            return total

        return sum(await asyncio.gather(*(work() for _ in range(in_flight))))

    async def ask_local(self, number: int) -> int:
        """Let an actor of this process add 1."""
        raise NotImplementedError

    async def spawn_idle(self, count: int) -> None:
        """Make actors in this process that nobody calls, and keep them."""
        raise NotImplementedError


def expected(array: Array) -> int:
    """Return what an actor must say about ``array``."""
    return int(array.size) + int(array[0]) + int(array[-1])


async def time_calls(call: Callable[[int], Awaitable[int]], answer: Callable[[int], int], budget: float) -> Record:
    """Call for ``budget`` seconds, one after the other, and return the median and the 99th percentile."""
    wrong = 0
    times: list[float] = []
    for seconds in (budget * WARM_UP, budget):
        times = []
        deadline = time.perf_counter() + seconds
        while (started := time.perf_counter()) < deadline or len(times) < LEAST_CALLS:
            number = len(times)
            got = await call(number)
            times.append(time.perf_counter() - started)
            wrong += got != answer(number)
    times.sort()
    p99 = times[math.ceil(0.99 * len(times)) - 1]
    return {"seconds": statistics.median(times), "p99": p99, "calls": len(times), "wrong": wrong}


async def time_concurrent(subject: Subject, budget: float, in_flight: int = IN_FLIGHT) -> Record:
    """Return the seconds per call with ``in_flight`` calls under way."""
    count, wrong, seconds = 2 * in_flight, 0, 0.0
    for share in (0.1, WARM_UP, 1.0):  # each run says how long the next must be
        started = time.perf_counter()
        total = await subject.ask_many(count, in_flight)
        seconds = (time.perf_counter() - started) / count
        wrong += total != count * (count + 1) // 2
        if share < 1.0:
            count = max(int(budget / seconds), 2 * in_flight)
    return {"seconds": seconds, "calls": count, "wrong": wrong}


async def time_array(subject: Subject, size: int, budget: float) -> Record:
    """Return the seconds of a call with ``size`` bytes, and the bytes per second."""
    array = np.zeros(size, np.uint8)

    async def take(number: int) -> int:
        array[0], array[-1] = number % 251, number % 241
        return await subject.take(array)

    record = await time_calls(take, lambda number: size + number % 251 + number % 241, budget)
    return record | {"size": size}


async def time_first(subject: Subject, size: int, budget: float) -> Record:
    """Return the seconds of the slowest of the first calls with ``size`` bytes, and of later ones (the median)."""
    array = np.zeros(size, np.uint8)
    wrong, times = 0, []
    for _ in range(FIRST_CALLS):
        started = time.perf_counter()
        got = await subject.take(array)
        times.append(time.perf_counter() - started)
        wrong += got != size
    later = await time_array(subject, size, budget)
    wrong += cast(int, later["wrong"])
    return {"seconds": max(times), "first": times, "later": later["seconds"], "size": size, "wrong": wrong}


async def weigh_idle(subject: Subject, count: int) -> Record:
    """Return how many bytes ``count`` idle actors add to this process."""
    gc.collect()
    before = resident_bytes()
    await subject.spawn_idle(count)
    gc.collect()
    after = resident_bytes()
    return {"bytes": after - before, "resident": after, "actors": count, "wrong": 0}


def resident_bytes() -> int:
    """Return how much memory this process holds (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(subject: Subject, options: argparse.Namespace, show: Callable[[Record], None]) -> None:
    """Take the figures that ``options`` asks for and ``show`` each."""
    budget = options.budget
    for figure in options.figures.split(","):
        if figure == "ask":
            show({"figure": figure} | await time_calls(subject.ask, lambda number: number + 1, budget))
        elif figure == "concurrent":
            show({"figure": figure} | await time_concurrent(subject, budget))
        elif figure.startswith(MANY):
            in_flight = int(figure.removeprefix(MANY))
            show({"figure": figure} | await time_concurrent(subject, budget, in_flight))
        elif figure == "first":
            show({"figure": figure} | await time_first(subject, options.first, budget))
        elif figure == "array":
            for size in map(int, options.sizes.split(",")):
                show({"figure": f"array {size}"} | await time_array(subject, size, budget))
        elif figure == "local" and subject.has_local:
            show({"figure": figure} | await time_calls(subject.ask_local, lambda number: number + 1, budget))
        elif figure == "idle" and subject.has_idle:
            show({"figure": figure} | await weigh_idle(subject, options.idle))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``measure`` needs."""
    parser.add_argument("--figures", required=True, help="of ask, concurrent, concurrent N, first, array, local, idle")
    parser.add_argument("--sizes", default="", help="bytes of arrays, separated by commas")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per figure")
    parser.add_argument("--idle", type=int, default=10_000, help="idle actors")
    parser.add_argument("--first", type=int, default=FIRST_BYTES, help="bytes of the first messages")


def parse_options() -> argparse.Namespace:
    """Return the options of a peer's process."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args()


def print_record(record: Record) -> None:
    """Write one JSON object as a line."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
