"""Measure the share of gradient synchronization that overlaps with the backward pass: two ranks, over TCP.

    scripts/bench/run overlap                        # on this host, compute as on an accelerator
    scripts/bench/run overlap --compute matmul       # on the cores that communication needs, too
    scripts/bench/run overlap --megabits 1000        # between two network namespaces at 1 Gbit/s (as root)

Timed are a step without compute, compute without a step, and both at once: compute reports each gradient from a worker
thread as a backward pass does.  Hidden is 1 - (both - compute) / communication.  The last bucket can only go when all
compute is done, so buckets are small here.  The three are measured in turn; shown are medians over the iterations of
the slowest rank, and beside them the fraction that the synchronizer's own statistics give, the least of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.jobs import LAUNCH, ONE_THREAD, JobFailedError, launch_across, records_of, run_together
from scripts.bench.namespaces import NoNamespacesError, wire
from scripts.bench.tables import markdown

_RANK = Path(__file__).with_name("overlap_rank.py")
_PORT = 29_401
_LIMIT = 300.0
WANTED = 0.90
AGREEMENT = 0.1
"""The statistics count time in which a bucket was under way, which is longer than communication alone."""


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=50_000_000, help="bytes of float32 (default: 50000000)")
    parser.add_argument("--parameters", type=int, default=96, help="gradients of equal size (default: 96)")
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="bucket size in MiB (default: 1)")
    parser.add_argument("--factor", type=float, default=1.0, help="compute over communication (default: 1)")
    parser.add_argument("--compute", choices=("device", "matmul"), default="device", help="default: device")
    parser.add_argument("--int8", action="store_true", help="compress the gradients to int8")
    parser.add_argument("--views", action="store_true", help="gradients lie in the buckets and are not copied")
    parser.add_argument("--transport", choices=("tcp", "shm", "grpc"), default="tcp", help="on one host (default: tcp)")
    parser.add_argument("--megabits", type=int, help="between namespaces, over a wire of this speed")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all figures into this file, too")
    arguments = parser.parse_args()
    megabits = 1 if arguments.megabits is None else arguments.megabits
    if min(arguments.size, arguments.parameters, arguments.iterations, megabits) < 1:
        parser.error("--size, --parameters, --iterations, --megabits: expected positive numbers")
    if min(arguments.factor, arguments.bucket_mb) <= 0.0:
        parser.error("--factor, --bucket-mb: expected positive numbers")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Run both ranks to their end and return the figures of rank 0."""
    program = [str(_RANK)]
    for name in ("size", "parameters", "bucket_mb", "iterations", "factor", "compute"):
        program += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    program += [f"--{name}" for name in ("int8", "views") if getattr(arguments, name)]
    if arguments.megabits is None:
        launch = [*LAUNCH, "--nproc-per-node=2", f"--transport={arguments.transport}"]
        output = run_together([[*launch, *program]], [os.environ | ONE_THREAD], limit=_LIMIT)
    else:
        with wire(arguments.megabits * 1_000_000) as ends:
            output = launch_across(ends, program, port=_PORT, limit=_LIMIT)
    figures: dict[str, float] = records_of(output)[0]
    if figures["wrong"]:
        raise JobFailedError(f"{figures['wrong']:.0f} elements were wrong")
    return figures


def hidden_part(figures: Mapping[str, float]) -> float:
    """Return the part of the communication that took no time of its own."""
    return min(1.0, 1.0 - (figures["both"] - figures["compute"]) / figures["communication"])


def show(figures: Mapping[str, float], title: str) -> list[str]:
    """Return the table and the verdicts."""
    hidden, counted = hidden_part(figures), figures["overlap_fraction"]
    rows = [["", "ms"]]
    rows += [[name, f"{figures[name] * 1e3:.1f}"] for name in ("communication", "compute", "both")]
    verdict = "ok" if hidden >= WANTED else "short"
    agreement = "ok" if abs(hidden - counted) <= AGREEMENT else "apart"
    return [
        title,
        "",
        *markdown(rows),
        "",
        f"hidden: {hidden:.3f} of the communication, {WANTED} wanted: {verdict}",
        f"overlap fraction of the statistics: {counted:.3f}, within {AGREEMENT} wanted: {agreement}",
    ]


def main() -> int:
    """Measure and show."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    try:
        figures = measure(arguments)
    except NoNamespacesError as error:
        sys.stdout.write(f"skipped: {error}\n")
        return 0
    except JobFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    where = f"over {arguments.transport}" if arguments.megabits is None else f"at {arguments.megabits} Mbit/s"
    title = f"{arguments.size / 1e6:g} MB, 2 ranks {where}, compute: {arguments.compute}"
    sys.stdout.write("\n".join(show(figures, title)) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
