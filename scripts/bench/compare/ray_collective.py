"""Measure Ray's collectives on asyncpar and on GLOO.

    scripts/bench/run ray_collective --rounds 200

``scripts/test-ray --version`` makes that environment.  Actors (``--ranks``) are in a group of each backend, and call
``ray.util.collective.allreduce`` of float32 in turns, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])])

import ray

from tests.engines.ray_members import Member

BACKENDS = ("asyncpar", "gloo")


def measure(ranks: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of each backend, over the slowest rank of each round."""
    members = [ray.remote(Member).options(num_cpus=1).remote() for _ in range(ranks)]
    groups = {backend: f"{backend}-{nbytes}" for backend in BACKENDS}
    for backend, group in groups.items():
        ray.get([member.join.remote(ranks, rank, group, backend) for rank, member in enumerate(members)])
    warm, measured = max(3, rounds // 10), rounds
    seconds = ray.get([member.time_rounds.remote(groups, nbytes // 4, warm + measured) for member in members])
    for member in members:
        ray.kill(member)
    slowest = {
        backend: [max(rank[backend][n] for rank in seconds) for n in range(warm, warm + measured)]
        for backend in BACKENDS
    }
    medians = {backend: statistics.median(times) for backend, times in slowest.items()}
    ratios = [theirs / ours for ours, theirs in zip(slowest["asyncpar"], slowest["gloo"], strict=True)]
    return {
        "ranks": ranks,
        "bytes": nbytes,
        "rounds": rounds,
        **{f"{backend}_ms": round(1e3 * median, 3) for backend, median in medians.items()},
        "times_faster": round(medians["gloo"] / medians["asyncpar"], 2),
        "quartiles": [round(each, 2) for each in statistics.quantiles(ratios)],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure each size in a pair of groups of its own, and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20], help="bytes")
    options = parser.parse_args()
    ray.init(num_cpus=options.ranks, include_dashboard=False, log_to_driver=False)
    for nbytes in options.sizes:
        print(json.dumps(measure(options.ranks, nbytes, options.rounds)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
