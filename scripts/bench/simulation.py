"""Simulations per second of a processor: programs of a few steps, with and without drawn faults.

    python scripts/bench/simulation.py [--seeds 200] [--profile]

Processor time, so that a busy machine does not matter.  Times two processors and 300 seconds are the seeds that fit
into five minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from asyncpar.testing.simulation import explore
from tests.testing.simulation.programs import bits, check_bits, check_sums, sums

ELASTIC = ("kill", "crash", "restart", "pause", "isolate", "reset", "half_open", "slow", "clock")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=200, help="how many of each kind")
    arguments.add_argument("--profile", action="store_true", help="show where the time goes")
    chosen = arguments.parse_args()
    kinds: dict[str, Callable[..., Any]] = {
        "4 ranks, 3 sums": partial(explore, sums, size=4, check=check_sums),
        "4 ranks, 3 sums, 3 faults": partial(explore, sums, size=4, check=check_sums, faults=3),
        "elastic, 3 nodes, 6 steps": partial(explore, bits, size=3, check=check_bits, elastic=True),
        "elastic, 3 nodes, 6 steps, 3 faults": partial(
            explore, bits, size=3, check=check_bits, elastic=True, faults=3, kinds=ELASTIC
        ),
    }
    for name, run in kinds.items():
        run(seeds=range(3))
        profile = cProfile.Profile() if chosen.profile else None
        begun = time.process_time()
        if profile is None:
            events = sum(result.events for result in run(seeds=range(chosen.seeds)))
        else:
            events = sum(result.events for result in profile.runcall(run, seeds=range(chosen.seeds)))
        seconds = (time.process_time() - begun) / chosen.seeds
        print(
            f"{name:38} {1e3 * seconds:6.1f} ms a seed, {1 / seconds:6.0f} seeds/s a processor, "
            f"{600 / seconds:8.0f} in 5 minutes on two, {events / chosen.seeds:5.0f} events"
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
