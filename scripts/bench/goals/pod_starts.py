"""Count how often pods whose names come late start a job.

    scripts/bench/run pod_starts --starts 20

Each start runs the very command of the manifests of ``asyncpar k8s`` in two simulated pods (see ``pods.py``; needs
root) with two ranks each, which reduce an array and end.  Names of pods resolve ``--names-after`` seconds after the
pods have started.  Prints a line for each start, and the figures as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from asyncpar.launch.kubernetes.manifests import KubernetesJob, make_manifests  # noqa: E402
from scripts.bench.pods import finish, running_pods  # noqa: E402

PODS, RANKS = 2, 2


def start(number: int, names_after: float, limit: float) -> tuple[bool, float]:
    """Start a job once; tell whether it ended well, and how many seconds after its names were known."""
    job = KubernetesJob(
        image="none",
        program=str(ROOT / "scripts" / "examples" / "first_steps.py"),
        name=f"start-{number}",
        nodes=PODS,
        tasks_per_node=RANKS,
        secret=os.urandom(32),
        python=sys.executable,
    )
    begun = time.perf_counter()
    with running_pods(make_manifests(job), names_after=names_after) as pods:
        try:
            ended = finish(pods, timeout=limit)
        except subprocess.TimeoutExpired:
            return False, time.perf_counter() - begun - names_after
    seconds = time.perf_counter() - begun - names_after
    is_well = all(code == 0 for code, _ in ended) and seconds > 0
    if not is_well:
        print("\n".join(output for _, output in ended), file=sys.stderr)
    return is_well, seconds


def main() -> int:
    """Start as often as asked; the exit code is 0 if all starts were well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--names-after", type=float, default=30.0, help="seconds until names of pods resolve")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that start at the same time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a start may take")
    options = parser.parse_args()
    well, most = 0, 0.0
    with ThreadPoolExecutor(options.at_once) as pool:
        starting = [pool.submit(start, number, options.names_after, options.limit) for number in range(options.starts)]
        for number, one in enumerate(starting):
            is_well, seconds = one.result()
            well, most = well + is_well, max(most, seconds)
            print(f"start {number}: {'well' if is_well else 'FAILED'}, {seconds:.1f} s after its names", flush=True)
    figures = {"starts": options.starts, "well": well, "pods": PODS, "ranks": PODS * RANKS}
    print(json.dumps({**figures, "names_after": options.names_after, "most_seconds_after_names": round(most, 1)}))
    return 0 if well == options.starts else 1


if __name__ == "__main__":
    sys.exit(main())
