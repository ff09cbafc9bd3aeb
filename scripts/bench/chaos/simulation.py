"""Count simulations per second of a processor: programs of a few steps, with drawn faults and without; or by the clock.

    scripts/bench/run simulation [--seeds 200] [--profile]
    scripts/bench/run simulation --seeds 10000 --processes 2 [--sieges]

The first is of processor time, so that a busy machine does not matter: times two processors and 300 seconds are the
seeds that fit into five minutes.  The second runs so many seeds of an elastic program under three faults of all kinds,
in so many processes, and reports how long that takes; a seed that fails is printed, and the exit code is 1.  With
``--sieges`` it is pauses and cuts of leaders, followers and their ranks, on 3, 4 and 5 hosts without a witness.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.testing.simulation import KINDS, SimulationFailed, explore, simulate
from tests.testing.simulation import pauses
from tests.testing.simulation.pauses import Siege
from tests.testing.simulation.programs import bits, check_bits, check_sums, sums

ELASTIC = tuple(kind for kind in KINDS if kind != "disk")
"""All kinds of faults but those of disks: ranks have nothing there."""

FAULTS = 3

elastic = partial(explore, bits, size=3, check=check_bits, elastic=True, faults=FAULTS, kinds=ELASTIC)

PROGRAMS: dict[str, Callable[..., Any]] = {
    "4 ranks, 3 sums": partial(explore, sums, size=4, check=check_sums),
    "4 ranks, 3 sums, 3 faults": partial(explore, sums, size=4, check=check_sums, faults=3),
    "elastic, 3 nodes, 6 steps": partial(explore, bits, size=3, check=check_bits, elastic=True),
    "elastic, 3 nodes, 6 steps, 3 faults": elastic,
}

_AT_A_TIME = 25
"""Seeds that a process is given at a time."""

_MOST_SHOWN = 20


def main() -> None:
    """Measure."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=200, help="how many of each kind")
    arguments.add_argument("--processes", type=int, help="run the elastic program with faults in so many, by the clock")
    arguments.add_argument("--sieges", action="store_true", help="with --processes: pauses and cuts of leaders")
    arguments.add_argument("--profile", action="store_true", help="show where the time goes")
    chosen = arguments.parse_args()
    if chosen.seeds < 1 or (chosen.processes is not None and chosen.processes < 1):
        arguments.error("--seeds and --processes: expected 1 or more")
    if chosen.processes is not None:
        raise SystemExit(run_by_the_clock(chosen.seeds, chosen.processes, are_sieges=chosen.sieges))
    for name, run in PROGRAMS.items():
        measure_processor_time(name, run, chosen.seeds, is_profiled=chosen.profile)


def measure_processor_time(name: str, run: Callable[..., Any], seeds: int, *, is_profiled: bool) -> None:
    """Print how much processor time a program takes for a seed."""
    run(seeds=range(3))
    profile = cProfile.Profile() if is_profiled else None
    begun = time.process_time()
    if profile is None:
        events = sum(result.events for result in run(seeds=range(seeds)))
    else:
        events = sum(result.events for result in profile.runcall(run, seeds=range(seeds)))
    seconds = (time.process_time() - begun) / seeds
    print(
        f"{name:38} {1e3 * seconds:6.1f} ms a seed, {1 / seconds:6.0f} seeds/s a processor, "
        f"{600 / seconds:8.0f} in 5 minutes on two, {events / seeds:5.0f} events"
    )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


def run_by_the_clock(seeds: int, processes: int, *, are_sieges: bool) -> int:
    """Run seeds of the elastic program under faults; print what failed, and how long it took; return the exit code."""
    run = run_sieges if are_sieges else run_seeds
    within = 1.1 * simulate(bits, size=3, elastic=True).seconds  # a little longer than it takes without faults
    batches = [range(start, min(start + _AT_A_TIME, seeds)) for start in range(0, seeds, _AT_A_TIME)]
    begun, failures, events = time.monotonic(), list[str](), 0
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for failed, happened in pool.map(run, batches, [within] * len(batches)):
            failures += failed
            events += happened
    seconds = time.monotonic() - begun
    for text in failures[:_MOST_SHOWN]:
        print(text)
    kinds, faults = (Siege().kinds, pauses.FAULTS) if are_sieges else (ELASTIC, FAULTS)
    found = {"seeds": seeds, "failed": len(failures), "seconds": seconds, "processes": processes, "kinds": kinds}
    print(json.dumps({**found, "faults_per_seed": faults, "events_per_seed": events / seeds}), flush=True)
    return 1 if failures else 0


def run_seeds(seeds: range, within: float) -> tuple[list[str], int]:
    """Run seeds of the elastic program, with faults ``within`` so many seconds; return which failed, and the events."""
    failures, events = list[str](), 0
    for seed in seeds:
        try:
            events += sum(result.events for result in elastic(seeds=[seed], within=within))
        except SimulationFailed as failed:
            failures.append(str(failed))
    return failures, events


def run_sieges(seeds: range, within: float) -> tuple[list[str], int]:  # noqa: ARG001  # drawn by the siege itself
    """Besiege 3, 4 and 5 hosts in turn; return which seeds failed, and the events."""
    failures, events = list[str](), 0
    for seed in seeds:
        try:
            events += pauses.besiege(seed, Siege(size=3 + seed % 3)).events
        except SimulationFailed as failed:
            failures.append(str(failed))
    return failures, events


if __name__ == "__main__":
    main()
