"""How long process groups take to be made: ``init_process_group`` and ``new_group``, over Gloo and asyncpar.

    python scripts/bench/torch_groups.py --ranks 4

Needs torch.  Each rank makes the default group ``--rounds`` times; the first time it also loads the backend's modules.
The slowest rank counts, as the others wait for it; later rounds are shown by their median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_GROUPS = 10
_PAUSE = 0.001


def be_rank(rank: int, backend: str, size: int, rounds: int, directory: str, times: object) -> None:
    """Make groups, and write how long that took into ``times``: a row per rank and round."""
    import torch
    import torch.distributed as dist

    for number in range(rounds):
        place = Path(directory)
        (place / f"ready-{number}-{rank}").touch()
        while not all((place / f"ready-{number}-{other}").exists() for other in range(size)):
            time.sleep(_PAUSE)
        begun = time.perf_counter()
        dist.init_process_group(backend, init_method=f"file://{place}/store-{number}", rank=rank, world_size=size)
        made = time.perf_counter()
        for _ in range(_GROUPS):
            dist.new_group()
        divided = time.perf_counter()
        assert isinstance(times, torch.Tensor)
        times[rank, number] = torch.tensor([made - begun, (divided - made) / _GROUPS])
        dist.destroy_process_group()


def measure(backend: str, size: int, rounds: int) -> list[list[float]]:
    """Return seconds of the slowest rank, for each round: of ``init_process_group``, of ``new_group``."""
    import torch
    import torch.multiprocessing as processes

    times = torch.zeros(size, rounds, 2, dtype=torch.float64).share_memory_()
    with tempfile.TemporaryDirectory() as directory:
        processes.spawn(be_rank, (backend, size, rounds, directory, times), nprocs=size)
    slowest: list[list[float]] = times.amax(0).tolist()
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the making of process groups.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=["gloo", "asyncpar"])
    options = parser.parse_args()
    print(f"{options.ranks} ranks; ms: first init, later init, new_group")
    for backend in options.backends:
        (first, _), *later = measure(backend, options.ranks, max(2, options.rounds))
        init, new = (statistics.median(column) for column in zip(*later, strict=True))
        print(f"{backend:10} {first * 1e3:8.1f} {init * 1e3:8.1f} {new * 1e3:8.2f}", flush=True)


if __name__ == "__main__":
    main()
