"""Measure what the event ring costs per operation, with recording on and off in turns, in one process per rank.

    scripts/bench/run recorder

All-reduces of 4 bytes between two ranks in shared memory, the shortest operations there are: ``rounds`` times, and each
time ``per_round`` with recording and as many without, the order drawn anew (the same on both ranks).  Without it, the
functions that write records are replaced by one that does nothing.  Then what recording takes without any operation
around it: the place in the program, the begin and the end of an operation, less the calls around them.

Limits of it (processor time, medians of rounds in turns, begin and end on their own, 0.71 us together): packing a whole
record takes 0.18 us, each of the two readings of the clock 0.07 us, and the interpreter most of the rest.  Native
instead of fixed byte order in ``struct`` changes nothing (below 0.01 us), a subscript instead of ``get`` and fewer
names saves 0.04 us, and a table of the offsets of all records 0.04 us more, for about 0.3 MB per node.
Stores through typed views of the memory instead of packing save 0.02 us at the end and take 0.1 us more at the begin.
"""

from __future__ import annotations

import argparse
import random
import timeit
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.collectives.engine import Engine


async def measure(node: ap.Node, *, rounds: int, per_round: int) -> tuple[list[float], list[float]]:
    """Return seconds per operation with and without recording, by round."""
    x, dice = np.zeros(1, np.float32), random.Random(18)
    for _ in range(2000):
        await node.world.all_reduce(x)
    (plan,) = node.world._engine.quick.values()
    recording = plan.record
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for is_on in dice.sample([True, False], 2):
            plan.record = recording if is_on else _nothing
            await node.world.barrier()
            begun = perf_counter()
            for _ in range(per_round):
                await node.world.all_reduce(x)
            times[is_on].append((perf_counter() - begun) / per_round)
    plan.record = recording
    return times[True], times[False]


def _nothing(*_: object) -> None:
    pass


def measure_alone(node: ap.Node) -> tuple[float, float]:
    """Return seconds for the records of an operation, and for those of one that is over without the loop."""
    engine: Engine = node.world._engine
    (quick,) = engine.quick.values()
    end = engine.table.context.record_end
    operation: Any = SimpleNamespace(description=quick.description, sequence=1, ticket=0)

    def full() -> None:
        engine._record(operation, engine._find_site())
        end(operation.ticket, 3)

    def short() -> None:
        engine._find_site()
        quick.record(1, 0.0, 0.0, 0)

    return _seconds(full), _seconds(short)


def _seconds(run: Callable[[], None]) -> float:
    """Return how long ``run`` takes as many calls below the user's as in an operation, less those calls."""

    def inner(run: Callable[[], None]) -> None:
        run()

    def user(run: Callable[[], None]) -> None:
        inner(run)

    def best(function: Callable[[], None]) -> float:
        return min(timeit.repeat(lambda: user(function), number=20_000, repeat=25)) / 20_000

    return best(run) - best(_nothing)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--per-round", type=int, default=250)
    options = parser.parse_args()
    async with ap.init() as node:
        on, off = await measure(node, rounds=options.rounds, per_round=options.per_round)
        if node.rank == 0:
            full, short = (1e6 * seconds for seconds in measure_alone(node))
        await node.world.barrier()
        if node.rank == 0:
            differences = [1e6 * (a - b) for a, b in zip(on, off, strict=True)]
            low, _, high = quantiles(differences, n=4)
            print(
                f"all_reduce, 4 bytes: {1e6 * median(on):.2f} us recorded, {1e6 * median(off):.2f} us not; best round"
            )
            print(f"{1e6 * min(on):.2f} and {1e6 * min(off):.2f}; median difference {median(differences):+.2f} us")
            print(f"(quartiles {low:+.2f} and {high:+.2f})")
            print(f"records alone: {full:.2f} us per operation, {short:.2f} us for one that is over without the loop")


if __name__ == "__main__":
    ap.run(main)
