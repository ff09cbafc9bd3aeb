"""Measure the time to make process groups: ``init_process_group`` and ``new_group``, over Gloo and asyncpar.

    scripts/bench/run torch_groups --ranks 4

Needs torch.  Each rank makes the default group ``--rounds`` times; the first time it also loads the backend's modules.
The slowest rank counts, as the others wait for it; ``--repeats`` runs of both take turns, and medians are shown.  The
CPU time is the mean of all ranks: unlike the rest it tells something on a machine that does other work, too.  Python
keeps bytecode here even where PYTHONDONTWRITEBYTECODE says not to: else it compiles all modules again in every rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

_GROUPS = 10


def be_rank(rank: int, backend: str, size: int, rounds: int, directory: str, times: object) -> None:
    """Make groups, and write how long that took into ``times``: a row per rank and round."""
    import torch
    import torch.distributed as dist

    assert isinstance(times, torch.Tensor)
    place = Path(directory)
    start = dist.FileStore(f"{place}/start", size)
    for number in range(rounds):
        start.set(f"{number}/{rank}", "here")
        start.wait([f"{number}/{other}" for other in range(size)])
        begun, busy = time.perf_counter(), time.process_time()
        dist.init_process_group(backend, init_method=f"file://{place}/store-{number}", rank=rank, world_size=size)
        made, busy = time.perf_counter(), time.process_time() - busy
        for _ in range(_GROUPS):
            dist.new_group()
        divided = time.perf_counter()
        times[rank, number] = torch.tensor([made - begun, busy, (divided - made) / _GROUPS])
        dist.destroy_process_group()


def measure(backend: str, size: int, rounds: int) -> list[float]:
    """Return seconds of a first init, its CPU time, a later init, and ``new_group``."""
    import torch
    import torch.multiprocessing as processes

    times = torch.zeros(size, rounds, 3, dtype=torch.float64).share_memory_()
    with tempfile.TemporaryDirectory() as directory:
        processes.spawn(be_rank, (backend, size, rounds, directory, times), nprocs=size)
    slowest = times.amax(0)
    later = slowest[1:].median(0).values.tolist()
    return [slowest[0, 0].item(), times[:, 0, 1].mean().item(), later[0], later[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the making of process groups.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backends", nargs="+", default=["gloo", "asyncpar"])
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for backend in options.backends:
        measure(backend, 1, 2)  # has bytecode written
    runs: dict[str, list[list[float]]] = {backend: [] for backend in options.backends}
    for _ in range(options.repeats):
        for backend, rows in runs.items():
            rows.append(measure(backend, options.ranks, max(2, options.rounds)))
    load = os.getloadavg()[0]
    print(f"{options.ranks} ranks, load {load:.1f}; ms: first init, its CPU time per rank, later init, new_group")
    for backend, rows in runs.items():
        shown = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{backend:10}", *(f"{milliseconds:8.1f}" for milliseconds in shown), flush=True)


if __name__ == "__main__":
    main()
