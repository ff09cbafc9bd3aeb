"""Measure when the cause of a loss comes under Slurm.

    scripts/bench/run slurm_faults --kills 10

A cluster of three nodes runs on this machine, from the packages that ``scripts/test-slurm`` unpacks.  *Ranks*: one of
three tasks of an ``srun`` is killed; seconds until ``srun`` shows who it was.  *Nodes*: the agent of one of two nodes
of ``ap.slurm.launch`` is killed; seconds until the exception at the caller.  One line of JSON each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from tests.engines.consoles import RecordingConsole
from tests.launchers.slurm_cluster import PLACE, SlurmCluster, is_unpacked

ROOT = Path(__file__).resolve().parents[3]
RANKS = ROOT / "tests" / "launchers" / "ranks.py"
PATIENCE = 60.0


def kill_a_rank(cluster: SlurmCluster, folder: Path) -> float:
    """Return the seconds from the death of rank 2 to its name, or the signal, in what ``srun`` shows."""
    step = cluster.begin(
        *("srun", "-N", "3", "-n", "3", "--kill-on-bad-exit=1", "--unbuffered"),
        *(sys.executable, "-u", str(RANKS), "endless", str(folder)),
    )
    assert step.stdout is not None
    try:
        cluster.until(lambda: len(list(folder.glob("pid-*"))) == 3, "three ranks")
        time.sleep(0.3)  # they exchange a few steps
        os.kill(int((folder / "pid-2").read_text()), signal.SIGKILL)
        killed = time.perf_counter()
        for line in step.stdout:
            if "rank 2" in line or "Killed" in line:
                return time.perf_counter() - killed
    finally:
        step.terminate()
        step.communicate()
    raise SystemExit("srun ended, and has not shown who was lost")


async def kill_a_node(folder: Path) -> float:
    """Return the seconds from the death of an agent to the exception at the caller."""
    launching = asyncio.ensure_future(
        ap.slurm.launch(programs.linger, str(folder), ranks=2, console=RecordingConsole())
    )
    async with asyncio.timeout(PATIENCE):
        while len(found := os.listdir(folder)) < 2:
            assert not launching.done(), launching
            await asyncio.sleep(0.05)
    parents = psutil.Process(int(found[0])).parents()
    next(one for one in parents if "asyncpar.engines.slurm_place" in one.cmdline()).kill()
    killed = time.perf_counter()
    await asyncio.wait({launching}, timeout=PATIENCE)
    took, failed = time.perf_counter() - killed, launching.exception()
    if not isinstance(failed, ExceptionGroup) or not isinstance(failed.exceptions[0], ap.PeerLost):
        raise AssertionError("the job has not failed by a lost node") from failed
    return took


def show(what: str, seconds: Sequence[float]) -> None:
    """Print a line of JSON."""
    figures: dict[str, Any] = {"what": what, "kills": len(seconds)}
    figures |= {"median": round(statistics.median(seconds), 2), "most": round(max(seconds), 2)}
    print(json.dumps({**figures, "load": os.getloadavg()[0]}), flush=True)


def main() -> None:
    """Measure both on one cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    kills = parser.parse_args().kills
    os.environ.setdefault(PLACE, str(ROOT / ".slurm"))
    if not is_unpacked():
        sys.exit("slurm_faults: there is no Slurm in .slurm; scripts/test-slurm unpacks it there")
    with tempfile.TemporaryDirectory(prefix="slurm-") as made, SlurmCluster(Path(made)) as cluster:
        os.environ.update(cluster.environment)
        folders = [Path(made, f"{kind}-{number}") for kind in ("rank", "node") for number in range(kills)]
        for folder in folders:
            folder.mkdir()
        show("ranks", [kill_a_rank(cluster, folder) for folder in folders[:kills]])
        show("nodes", [asyncio.run(kill_a_node(folder)) for folder in folders[kills:]])


if __name__ == "__main__":
    main()
