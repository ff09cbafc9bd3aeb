"""Measure how soon commands see a job: `status` after a rank was stopped (goal A2), `stacks` of 8 ranks (goal A6).

``scripts/bench/run look [--rounds N]`` prints medians and the slowest, and ends with code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PROGRAM = """
import asyncio
import numpy as np
import asyncpar as ap

async def main():
    async with ap.init() as node:
        x = np.ones(1000, np.float32)
        while True:
            await node.world.all_reduce(x)
            x[:] = 1.0
            await asyncio.sleep(0.02)

asyncio.run(main())
"""
STATUS_SECONDS, STACKS_SECONDS = 2.0, 1.0


def command(*arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "asyncpar", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def until(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit("the job was not seen in time")
        time.sleep(0.02)
    return found


def with_job(ranks: int, work: Path, measure: Callable[[dict[str, str]], list[float]]) -> list[float]:
    (work / "job.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPAR_")}
    environment |= {"XDG_RUNTIME_DIR": str(work), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(ranks), "--silent-after", "off", "job.py"],
        cwd=work,
        env=environment,
    )
    try:
        until(lambda: len(ready(environment)) == ranks)
        return measure(environment)
    finally:
        job.kill()
        job.wait()


def ready(environment: dict[str, str]) -> dict[int, int]:
    """Return the processes of ranks that are members, by rank."""
    text = command("status", "--json", environment=environment)
    hosts = json.loads(text).get("hosts", ()) if text else []
    return {
        rank["rank"]: rank["pid"]
        for host in hosts
        for rank in host.get("ranks", ())
        if (rank.get("summary") or {}).get("phase") == "member"
    }


def stopped_rank(environment: dict[str, str], rounds: int) -> list[float]:
    """Return the seconds from SIGSTOP until `status` names the rank, the operation and the place."""
    pids, found = ready(environment), []
    for number in range(rounds):
        rank = number % len(pids)
        os.kill(pids[rank], signal.SIGSTOP)
        began = time.monotonic()

        def is_named(rank: int = rank) -> bool:
            lines = command("status", environment=environment).splitlines()
            row = [line for line in lines if line.split()[:1] == [str(rank)]]
            others = [line for line in lines if "all_reduce #" in line and "job.py:" in line]
            return bool(row and "stopped" in row[0] and "job.py:" in row[0] and others)

        until(is_named)
        found.append(time.monotonic() - began)
        os.kill(pids[rank], signal.SIGCONT)
        time.sleep(0.5)
    return found


def all_stacks(environment: dict[str, str], rounds: int) -> list[float]:
    """Return the seconds of `stacks`, with one rank of all stopped."""
    pids, found = ready(environment), []
    os.kill(pids[3], signal.SIGSTOP)
    time.sleep(0.5)
    for _ in range(rounds):
        began = time.monotonic()
        told = json.loads(command("stacks", "--json", environment=environment))
        found.append(time.monotonic() - began)
        if len(told["ranks"]) != len(pids) - 1 or list(told["silent"]) != ["3"]:
            raise SystemExit(f"told: {sorted(told['ranks'])}, silent: {told['silent']}")
    os.kill(pids[3], signal.SIGCONT)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    is_good = True
    for title, ranks, limit, measure in (
        ("status names a stopped rank of 4", 4, STATUS_SECONDS, stopped_rank),
        ("stacks of 8 ranks, one stopped", 8, STACKS_SECONDS, all_stacks),
    ):
        with tempfile.TemporaryDirectory() as work:
            found = with_job(ranks, Path(work), partial(measure, rounds=rounds))
        median, slowest = statistics.median(found), max(found)
        is_good = is_good and median <= limit
        print(f"{title}: median {median:.2f} s, slowest {slowest:.2f} s (goal {limit:g} s)", flush=True)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
