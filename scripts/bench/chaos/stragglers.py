"""Make one of four ranks slow in a known way, and see whether `asyncpar status` names it and why.

    scripts/bench/run stragglers --cases none,compute,link --seconds 15

Every rank loads, computes and all-reduces in steps of about 50 ms, most of which it sleeps.  Rank 2 does more of one
thing: a fifth of a step of computing or of waiting for input, garbage collections of the oldest generation, code that
blocks its event loop for 1.5 s in each fifth step, or it has to share its processor with other programs at a lower
priority.  With ``crowded`` no rank is slow, but all compute for most of a step, on fewer processors than there are
ranks.  In cases whose names begin with ``training`` ranks do not all-reduce, but take steps of a
GradientSynchronizer with 24 buckets.  With ``link`` each rank has a host of its own, a namespace on one bridge, and
that of rank 2 sends at 20 Mbit/s, the others at 500 (needs root).

The last line on stdout is one JSON object: per case how many of the inspections, one a second, found the right rank and
cause, another one, or nothing, and for how many seconds the main thread of each rank has waited for a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.observe.rounds import Cause
from asyncpar.observe.stragglers import WINDOW
from scripts.bench.namespaces import bridge

CULPRIT = 2
SLOW_BITS, FAST_BITS = 20_000_000, 500_000_000
CAUSES = {
    "compute": Cause.COMPUTE,
    "input": Cause.INPUT,
    "collection": Cause.COLLECTION,
    "niced": Cause.TAKEN,
    "link": Cause.LINK,
    "blocked": Cause.BLOCKED,
    "training": Cause.COMPUTE,
    "training-input": Cause.INPUT,
    "training-blocked": Cause.BLOCKED,
}
QUIET = ("none", "crowded", "training-none")
"""Cases without a slow rank."""

WORDS = {
    Cause.COMPUTE: "what it computes",
    Cause.INPUT: "its input",
    Cause.COLLECTION: "garbage collection",
    Cause.TAKEN: "other programs",
    Cause.LINK: "its link",
    Cause.BLOCKED: "code that blocks its event loop",
}

PROGRAM = """
import asyncio, gc, itertools, os, sys, time
import numpy as np
import asyncpar as ap
from asyncpar.gradsync import GradientBucketingConfig, GradientSynchronizer

def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

async def main():
    case, is_training = sys.argv[1].removeprefix("training-"), sys.argv[1].startswith("training")
    case = "compute" if case == "training" else case
    async with ap.init() as node:
        slow = node.rank == 2
        if case == "niced" and slow:
            os.nice(10)  # among the threads of its session
            if os.path.exists("/proc/self/autogroup"):  # sessions share processors alike, unless they are niced, too
                with open("/proc/self/autogroup", "w") as nice:
                    nice.write("10")
        garbage = [[number] for number in range(60_000)] if case == "collection" and slow else []
        gc.collect()
        x = np.ones(1 << 17 if case == "link" else 1024, np.float32)
        bucketing = GradientBucketingConfig(bucket_size_mb=0.01, max_buckets=24)
        synchronizer = GradientSynchronizer.data_parallel(node.world, bucketing=bucketing)
        gradients = {f"w{number}": np.ones(2500, np.float32) for number in range(24)}
        for step in itertools.count():
            with ap.span("load batch"):
                await asyncio.sleep(0.005 + (0.012 if case == "input" and slow else 0))
            if case == "crowded":
                compute(0.035)
            else:
                await asyncio.sleep(0.035)
            compute(0.004 + (0.012 if case == "compute" and slow else 0))
            if case == "collection" and slow:
                gc.collect()
            if case == "blocked" and slow and step % 5 == 0:
                time.sleep(1.5)
            if is_training:
                await synchronizer.synchronize_gradients(gradients)
                continue
            await node.world.all_reduce(x, "max", algorithm="ring" if case == "link" else None)

ap.run(main)
"""


def measure(case: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one case, and return what `status` said."""
    program = folder / f"{case}.py"
    program.write_text(PROGRAM)
    name = f"straggler_{case}_{os.getpid()}".replace("-", "_")  # as jobs are called
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 if case == "niced" else 0)]
    looks: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    with hosts_of(case, folder, name) as commands:
        jobs = [
            subprocess.Popen([*command, str(program), case], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for command in commands
        ]
        try:
            waited = watch(case, f"{name}-{jobs[0].pid}", seconds, looks, texts)  # its launcher sees all hosts
        finally:
            for process in (*jobs, *hogs):
                process.terminate()
                process.wait()
    return {**looks, "said": [text for text, _ in texts.most_common(2)], "waited_s": waited}


@contextmanager
def hosts_of(case: str, folder: Path, name: str) -> Iterator[list[list[str]]]:
    """Yield the commands that launch the job: one on this host, or one on each of four."""
    launch = [sys.executable, "-m", "asyncpar", "launch", f"--rdzv-id={name}"]
    if case != "link":
        yield [[*launch, "--nproc-per-node=4"]]
        return
    secret = folder / "job.secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    with bridge([SLOW_BITS if rank == CULPRIT else FAST_BITS for rank in range(4)]) as ends:
        meeting = ["--nnodes=4", f"--rdzv-endpoint={ends[0].address}:29400", f"--secret-file={secret}"]
        yield [end.enter([*launch, *meeting, f"--node-rank={rank}"]) for rank, end in enumerate(ends)]


def watch(case: str, name: str, seconds: float, looks: Counter[str], texts: Counter[str]) -> list[float]:
    """Look at the job once a second; return for how long each rank has waited for a processor."""
    began, waited = time.monotonic(), list[float]()
    while time.monotonic() - began < seconds:
        time.sleep(1.0)
        job = status(name)
        reports = [report for host in job.get("hosts", ()) for report in host.get("ranks", ())]
        summaries = [report.get("summary", {}) for report in sorted(reports, key=lambda report: report["rank"])]
        if len(summaries) < 4 or any(len(summary.get("rounds", ())) < WINDOW for summary in summaries):
            continue  # nobody can tell yet
        looks[judge(case, job.get("alarms", []))] += 1
        texts.update(job.get("alarms", []))
        waited = [round(summary.get("stolen", 0.0), 1) for summary in summaries]
    return waited


def status(name: str) -> dict[str, Any]:
    """Return the job of that name, empty if it cannot be looked at."""
    asked = subprocess.run(
        [sys.executable, "-m", "asyncpar", "status", "--json", name], capture_output=True, text=True, check=False
    )
    return json.loads(asked.stdout) if asked.returncode == 0 else {}


def judge(case: str, alarms: list[str]) -> str:
    """Return whether ``alarms`` are right, wrong or silent."""
    if not alarms:
        return "right" if case in QUIET else "silent"
    if case in QUIET:
        return "wrong"
    is_right = any(alarm.startswith(f"rank {CULPRIT} ") and WORDS[CAUSES[case]] in alarm for alarm in alarms)
    return "right" if is_right else "wrong"


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join((*QUIET, *CAUSES)))
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    cases = options.cases.split(",")
    unknown = set(cases) - {*QUIET, *CAUSES}
    if unknown:
        parser.error(f"--cases: expected some of {', '.join((*QUIET, *CAUSES))}, got {', '.join(sorted(unknown))}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as folder:
        for case in cases:
            found[case] = measure(case, Path(folder), options.seconds)
            print(f"{case}: {found[case]}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
