"""Time all_reduce by size in the columns of nccl-tests, for numbers of ranks and transports.

    python scripts/bench/all_reduce.py --nproc 2 4 --transport tcp grpc --min 4 --max 100M

Each combination is launched as real processes on this host.  ``time`` is the median over the iterations of the slowest
rank, ``algbw`` = size / time, ``busbw`` = algbw * 2 (n - 1) / n, ``wrong`` the number of wrong elements, all checked.
Sizes grow by the factor 4 (``--factor``); 100 MB and 25 MB are always among them when they lie in the range.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import asyncpar as ap

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_NOTABLE = (25_000_000, 100_000_000)
_SECONDS_PER_SIZE = 1.0


def parse_size(text: str) -> int:
    """Return the number of bytes of ``4``, ``64K`` or ``100M`` (M: 1,000,000 as in the tables of the README)."""
    text = text.upper().removesuffix("B")
    number, unit = text.rstrip("KM"), text[len(text.rstrip("KM")) :]
    if not number.isdecimal() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size such as 4, 64K or 100M, got {text!r}")
    return int(number) * (1_000_000 if unit == "M" else _UNITS[unit])


def sizes_between(smallest: int, largest: int, factor: int) -> list[int]:
    """Return the sizes to measure, ascending."""
    sizes = {size for size in _NOTABLE if smallest <= size <= largest}
    size = smallest
    while size <= largest:
        sizes.add(size)
        size *= factor
    return sorted(sizes)


async def measure(comm: ap.Communicator, size: int, algorithm: str | None) -> tuple[float, int]:
    """Return the median seconds of one all_reduce of ``size`` bytes on the slowest rank, and its wrong elements."""
    count = max(size // 4, 1)
    template = (np.arange(count, dtype=np.float32) % 251) + comm.rank
    expected = (np.arange(count, dtype=np.float32) % 251) * comm.size + comm.size * (comm.size - 1) / 2
    x = template.copy()
    await comm.all_reduce(x, algorithm=algorithm)
    wrong = int(np.count_nonzero(x != expected))
    for _ in range(2):
        await comm.all_reduce(x, algorithm=algorithm)
    await comm.barrier()
    started = time.perf_counter()
    await comm.all_reduce(x, algorithm=algorithm)
    once = np.array([time.perf_counter() - started])
    await comm.all_reduce(once, op="max")
    iterations = int(min(max(_SECONDS_PER_SIZE / once[0], 5), 1000))
    times = []
    for _ in range(iterations):
        x[:] = 0
        started = time.perf_counter()
        await comm.all_reduce(x, algorithm=algorithm)
        times.append(time.perf_counter() - started)
    outcome = np.array([statistics.median(times), wrong])
    await comm.all_reduce(outcome, op="max")
    return float(outcome[0]), int(outcome[1])


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints the table."""
    async with ap.init() as node:
        comm = node.world
        if comm.rank == 0:
            lane = node.links.lane_kind(1) if comm.size > 1 else "none"
            print(f"# all_reduce float32 sum, {comm.size} ranks, {lane} lanes")
            print(f"{'size':>12} {'count':>12} {'type':>8} {'time':>12} {'algbw':>8} {'busbw':>8} {'wrong':>6}")
            print(f"{'(B)':>12} {'(elements)':>12} {'':>8} {'(us)':>12} {'(GB/s)':>8} {'(GB/s)':>8}")
        for size in sizes_between(arguments.min, arguments.max, arguments.factor):
            seconds, wrong = await measure(comm, size, arguments.algorithm)
            if comm.rank == 0:
                algbw = size / seconds / 1e9
                busbw = algbw * 2 * (comm.size - 1) / comm.size
                print(
                    f"{size:>12} {size // 4:>12} {'float32':>8} {seconds * 1e6:>12.1f} "
                    f"{algbw:>8.3f} {busbw:>8.3f} {wrong:>6}",
                    flush=True,
                )
        await comm.barrier()


def main() -> int:
    """Launch a job per combination, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--transport", nargs="+", default=["tcp", "grpc"])
    parser.add_argument("--min", type=parse_size, default="4")
    parser.add_argument("--max", type=parse_size, default="100M")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--algorithm", help="pin one algorithm instead of the adaptive choice")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        ap.run(lambda: work(arguments))
        return 0
    for nproc in arguments.nproc:
        for transport in arguments.transport:
            launch = [
                sys.executable,
                "-m",
                "asyncpar",
                "launch",
                f"--nproc-per-node={nproc}",
                f"--transport={transport}",
            ]
            passed = [f"--min={arguments.min}", f"--max={arguments.max}", f"--factor={arguments.factor}", "--worker"]
            if arguments.algorithm:
                passed.append(f"--algorithm={arguments.algorithm}")
            outcome = subprocess.run([*launch, str(Path(__file__)), *passed], check=False)
            if outcome.returncode != 0:
                return outcome.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
