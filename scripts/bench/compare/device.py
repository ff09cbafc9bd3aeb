"""Time all_reduce of arrays on CUDA devices: asyncpar, torch.distributed's NCCL and bare nccl4py, in one run.

    scripts/bench/run device                               # a rank per GPU, or two ranks on the only one
    scripts/bench/run device --sizes 4,1MB,1GB --rounds 5

In every round all sides reduce the same float32 array one after the other, and each operation is waited for, by
`await`, `torch.cuda.synchronize` and the stream.  A figure of a round is the median on the slowest rank; shown are
medians over rounds.  Wanted: within 5 us of bare NCCL below 1 MB, within 3 % of it from there on, and a 1 ms timer of
the event loop late by at most 2 ms (p99) while asyncpar reduces.  Needs `pip install "asyncpar[nccl,torch]"` and a GPU;
without one it says so and ends with 3.

    scripts/bench/run device --without-gpu                 # asyncpar's own share of a call, without any device

With `--without-gpu` two ranks reduce 4 bytes over a fabric that does nothing: what is left is what asyncpar takes to
check, agree, enqueue and come back; `one rank` has nobody to agree with, `numpy` is the same call on the host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.bench.sizes import parse_size, short_size
from asyncpar.device.fabric import FabricUnavailable
from asyncpar.device.nccl_library import SHARED
from asyncpar.errors import UsageError
from scripts.bench.jobs import LAUNCH, records_of, run_together
from scripts.bench.tables import markdown

NO_GPU = 3
"""The exit status where there is no GPU, or what it needs is not installed."""

SIDES = ("asyncpar", "torch", "bare")
DEFAULT_SIZES = "4,64,1K,8K,64K,256K,1MB,4MB,25MB,100MB,1GB"
_RANK = Path(__file__).with_name("device_rank.py")
_OVERHEAD_RANK = Path(__file__).with_name("device_overhead_rank.py")
_LIMIT = 540.0
_SMALL = 1_000_000
_SLACK_SECONDS, _SLACK_SHARE, _LATENESS = 5e-6, 0.03, 2e-3


def count_devices() -> int:
    """Return how many GPUs NCCL can use here.  Raises ``FabricUnavailable``."""
    from asyncpar.device.nccl import open_nccl_fabric

    return len(open_nccl_fabric().devices())


def verdict(ours: float, bare: float, size: int) -> str:
    """Return ``ok`` where ``ours`` is as near to ``bare`` as is wanted."""
    allowed = bare + _SLACK_SECONDS if size < _SMALL else bare * (1.0 + _SLACK_SHARE)
    return "ok" if ours <= allowed else "short"


def show(records: Sequence[Mapping[str, Any]], *, ranks: int, devices: int) -> list[str]:
    """Return the table, and the lateness of the loop."""
    times: dict[tuple[int, str], list[float]] = {}
    for record in records:
        if record["what"] == "time":
            times.setdefault((record["size"], record["side"]), []).append(record["seconds"])
    rows = [["size", *(f"{side} (us)" for side in SIDES), "asyncpar / bare", "asyncpar - bare (us)", "wanted"]]
    for size in sorted({size for size, _ in times}):
        ours, theirs, bare = (statistics.median(times[size, side]) for side in SIDES)
        figures = [f"{1e6 * one:.1f}" for one in (ours, theirs, bare)]
        rows.append(
            [short_size(size), *figures, f"{ours / bare:.3f}x", f"{1e6 * (ours - bare):.1f}", verdict(ours, bare, size)]
        )
    late = max(record["p99"] for record in records if record["what"] == "lateness")
    timely = "ok" if late <= _LATENESS else "short"
    return [
        f"{ranks} ranks on {devices} GPUs, float32",
        "",
        *markdown(rows),
        "",
        f"A 1 ms timer of the loop was late by {1e3 * late:.2f} ms (p99); at most 2 ms wanted: {timely}",
    ]


def measure_overhead(rounds: int) -> list[str]:
    """Return what a call takes over a fabric that does nothing, as a table."""
    command = [*LAUNCH, "--nproc-per-node=2", str(_OVERHEAD_RANK)]
    records = records_of(run_together([[*command, "--rounds", str(rounds)]], [dict(os.environ)], limit=_LIMIT))
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record["side"], []).append(record["seconds"])
    rows = [["call", "us"], *([side, f"{1e6 * statistics.median(those):.1f}"] for side, those in times.items())]
    return ["2 ranks, 4 bytes, no device", "", *markdown(rows)]


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help=f"bytes (default: {DEFAULT_SIZES})")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, help="default: one per GPU, or 2")
    parser.add_argument("--without-gpu", action="store_true", help="measure asyncpar's own share of a call only")
    arguments = parser.parse_args()
    try:
        sizes = [parse_size("--sizes", size) for size in arguments.sizes.split(",")]
    except UsageError as error:
        parser.error(str(error))
    if arguments.rounds < 1 or (arguments.ranks is not None and arguments.ranks < 1):
        parser.error("--rounds, --ranks: expected positive numbers")
    if arguments.without_gpu:
        print("\n".join(measure_overhead(arguments.rounds)))
        return 0
    try:
        devices = count_devices()
    except FabricUnavailable as error:
        print(f"not measured: {error}", file=sys.stderr)
        return NO_GPU
    ranks = arguments.ranks or max(2, devices)
    surroundings = dict(os.environ) if ranks <= devices else os.environ | {SHARED: "1"}
    command = [*LAUNCH, f"--nproc-per-node={ranks}", str(_RANK)]
    command += ["--sizes", ",".join(map(str, sizes)), "--rounds", str(arguments.rounds)]
    records = records_of(run_together([command], [surroundings], limit=_LIMIT))
    print("\n".join(show(records, ranks=ranks, devices=devices)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
