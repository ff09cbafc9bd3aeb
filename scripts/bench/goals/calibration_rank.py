"""One rank of ``calibration.py``: tuned steps, and then pinned choices by turns; a line of JSON for each size."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

import asyncpar as ap
from asyncpar.gradsync import GradientSynchronizer, TuningConfig

_PARAMETERS = 16
_BUCKETS = ("25m", "4m", "1m")
_MESSAGES = ("", "/256k", "/2m")
_HOPELESS = 3.0
_FINALISTS = 3
"""Quickest pins that are measured again: the least of dozens of medians is one that was lucky."""

_MORE_ROUNDS = 3
"""So many times as many steps as in the first comparison."""


def pins_of(comm: ap.Communicator, size: int) -> list[str]:
    """Return the pins to compare: the same on all ranks."""
    is_layered = 1 < len(comm.hosts) < comm.size
    names = [name for name in comm.algorithms("all_reduce") if is_layered or not name.startswith("hierarchical")]
    expected = {name: comm.predict("all_reduce", size, algorithm=ap.Name(name)) for name in names}
    kept = [name for name in names if expected[name] <= _HOPELESS * min(expected.values())]
    forms = [name + messages for name in kept for messages in ("",) if name == "arena" or messages == ""]
    forms += [name + messages for name in kept for messages in _MESSAGES[1:] if name != "arena" and size > 1 << 20]
    buckets = [bucket for bucket in _BUCKETS if bucket == _BUCKETS[0] or size > int(bucket[:-1]) << 20]
    return [f"{bucket}@{form}" for bucket in buckets for form in forms]


def finalists_of(medians: dict[str, float], choice: str) -> list[str]:
    """Return what is measured again, by turns: the choice, and the quickest of the other pins."""
    others = sorted((pin for pin in medians if pin != choice), key=lambda pin: medians[pin])
    return [choice, *others[:_FINALISTS]]


class Side:
    """A synchronizer with gradients of its own."""

    def __init__(self, comm: ap.Communicator, size: int, tuning: TuningConfig, name: str, compute: float) -> None:
        self._comm, self._compute = comm, compute
        count = max(size // 4 // _PARAMETERS, 1)
        self._gradients = {f"w{place}": np.ones(count, np.float32) for place in range(_PARAMETERS)}
        self.synchronizer = GradientSynchronizer.data_parallel(comm, tuning=tuning, name=name)

    async def step(self) -> float:
        """Take one step, and return the seconds of its synchronization."""
        await self._comm.barrier()
        if self._compute:
            await asyncio.sleep(self._compute)
        started = time.perf_counter()
        await self.synchronizer.synchronize_gradients(self._gradients)
        return time.perf_counter() - started

    async def steps(self, count: int) -> list[float]:
        """Take steps, and return what each took on the slowest rank."""
        own = np.array([await self.step() for _ in range(count)])
        return [float(seconds) for seconds in await self._comm.all_reduce(own, "max")]


async def compare(comm: ap.Communicator, size: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Tune, and then let the choice that was found and all pins take turns."""
    tuned = Side(comm, size, TuningConfig(), f"tuned {size}", arguments.compute)
    await tuned.steps(arguments.steps)
    outcome, table = tuned.synchronizer.tuning_outcome(), tuned.synchronizer.tuning_table()
    assert outcome is not None, "steps were tuned"
    choice, lost = outcome.best, outcome.lost / outcome.seconds
    pins = dict.fromkeys([choice, *pins_of(comm, size)])
    sides = {
        pin: Side(comm, size, TuningConfig(pin=pin), f"{pin} {size}", arguments.compute)
        for pin in pins
        if pin != choice
    }
    tuned.synchronizer.update_tuning_config(TuningConfig(pin=choice))
    sides[choice] = tuned
    await take_turns(sides, 2)  # which make buffers
    medians = await take_turns(sides, arguments.rounds)
    finalists = {pin: sides[pin] for pin in finalists_of(medians, choice)}
    final = await take_turns(finalists, _MORE_ROUNDS * arguments.rounds)
    for side in sides.values():
        side.synchronizer.close()
    return {"size": size, "choice": choice, "times": medians, "final": final, "lost": lost, "table": table}


async def take_turns(sides: dict[str, Side], rounds: int) -> dict[str, float]:
    """Let all sides step by turns and return their medians."""
    times: dict[str, list[float]] = {pin: [] for pin in sides}
    for _ in range(rounds):
        for pin, side in sides.items():
            times[pin] += await side.steps(1)
    return {pin: statistics.median(one) for pin, one in times.items()}


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    async with ap.init() as node:
        for size in map(int, arguments.sizes.split(",")):
            record = await compare(node.world, size, arguments)
            if node.rank == 0:
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
        await node.world.barrier()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True)
    arguments = parser.parse_args()
    ap.run(lambda: work(arguments))


if __name__ == "__main__":
    main()
