"""Measure what engines survive: jobs at once that share workers, killed workers, interrupted cells of notebooks.

    scripts/bench/run engine_faults --pairs 100 --kills 10 --cells 20

*Pairs*: that many jobs of two workers each, all begun at once on a Dask cluster of five, which may want the same
workers; none may wait for ever.  *Kills*: seconds from the SIGKILL of a worker of Dask to the exception at the caller.
*Cells*: a cell of a Jupyter kernel launches two ranks, is interrupted while they run, and launches again; nothing may
be left.  One line of JSON each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from tests.engines.consoles import RecordingConsole
from tests.engines.kernels import interrupt_a_cell, start_kernel

WORKERS = 5
PATIENCE = 600.0


async def run_pairs(client: Any, pairs: int) -> dict[str, Any]:
    """Begin all jobs at once, each on two workers drawn at random."""
    names, draw = list(client.scheduler_info(n_workers=-1)["workers"]), random.Random(19)

    async def one() -> float:
        begun = time.perf_counter()
        workers = draw.sample(names, 2)
        async with ap.dask.world(client, workers=workers, wait=PATIENCE, console=RecordingConsole()) as mesh:
            assert len(mesh) == 2
        return time.perf_counter() - begun

    begun = time.perf_counter()
    async with asyncio.timeout(PATIENCE):
        seconds = await asyncio.gather(*(one() for _ in range(pairs)))
    took = time.perf_counter() - begun
    return {"what": "pairs", "jobs": len(seconds), "seconds": round(took, 1), "longest": round(max(seconds), 1)}


async def kill_workers(client: Any, kills: int) -> dict[str, Any]:
    """Kill one of two workers under a job, again and again."""
    seconds = [await _kill_a_worker(client) for _ in range(kills)]
    return {
        "what": "kills",
        "rounds": kills,
        "median": round(statistics.median(seconds), 3),
        "most": round(max(seconds), 3),
        "within_2_s": sum(each <= 2.0 for each in seconds),
    }


async def _kill_a_worker(client: Any) -> float:
    await asyncio.to_thread(client.wait_for_workers, WORKERS)
    pids = await asyncio.to_thread(client.run, os.getpid)
    chosen = sorted(pids)[:2]
    with tempfile.TemporaryDirectory() as folder:
        launching = asyncio.ensure_future(
            ap.dask.launch(client, programs.linger, folder, ranks=2, workers=chosen, console=RecordingConsole())
        )
        while len(os.listdir(folder)) < 2:
            assert not launching.done(), launching
            await asyncio.sleep(0.02)
        os.kill(pids[chosen[1]], signal.SIGKILL)
        killed = time.perf_counter()
        await asyncio.wait({launching})
        took, failed = time.perf_counter() - killed, launching.exception()
    if not isinstance(failed, ExceptionGroup) or not isinstance(failed.exceptions[0], ap.PeerLost):
        raise AssertionError("the job has not failed by a lost worker") from failed
    return took


def interrupt_cells(cells: int) -> dict[str, Any]:
    """Interrupt a cell and launch again, in one kernel."""
    done, trouble = 0, ""
    with start_kernel() as kernel:
        for _ in range(cells):
            try:
                interrupt_a_cell(kernel)
            except (AssertionError, queue.Empty) as error:
                trouble = str(error) or type(error).__name__
                break
            done += 1
    return {"what": "cells", "rounds": cells, "launched_again": done, **({"trouble": trouble} if trouble else {})}


def on_dask(measure: Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    """Run a measurement on a cluster of its own."""
    from distributed import Client

    with Client(n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0") as client:
        return asyncio.run(measure(client))


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--cells", type=int, default=20)
    options = parser.parse_args()
    if options.pairs:
        show(on_dask(lambda client: run_pairs(client, options.pairs)))
    if options.kills:
        show(on_dask(lambda client: kill_workers(client, options.kills)))
    if options.cells:
        show(interrupt_cells(options.cells))


def show(figures: dict[str, Any]) -> None:
    """Print a line of JSON."""
    print(json.dumps({**figures, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
