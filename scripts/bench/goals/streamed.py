"""Measure data parallel steps on a slow wire, with an optimizer that begins before the last gradient has come.

    scripts/bench/run streamed
    scripts/bench/run streamed --size 25000000 --steps 3 --megabits 100

Two network namespaces, a rank in each, shaped in both directions.  A step computes for a while (``--compute`` seconds
of matrix products, in which gradients become final one after the other), averages ``--size`` bytes of float32 gradients
by ``GradientSynchronizer``, and moves the parameters by AdamW.  The two sides differ in when they do that: *behind* the
synchronization, or *in* it, by ``step(parameters, update=EarlyStep(...))``.  They take turns, step by step, in the same
processes, on models of their own, which must have equal bits at the end.  Shown are medians over steps on the slowest
rank, and the median of the ratios of neighbouring steps.

The last line is one JSON object.  Needs root, ip and tc; says so and ends with 0 where namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.jobs import JobFailedError, launch_across, records_of
from scripts.bench.namespaces import NoNamespacesError, payload_rate, wire

_RANK = Path(__file__).with_name("streamed_rank.py")
_PORT = 29_410
_LIMIT = 900.0
_WANTED = 0.08
"""By what part steps are to be shorter."""


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=100_000_000, help="bytes of gradients (default: 100000000)")
    parser.add_argument("--megabits", type=int, default=1000, help="speed of the wire (default: 1000)")
    parser.add_argument("--steps", type=int, default=15, help="of each side (default: 15)")
    parser.add_argument("--compute", type=float, default=0.2, help="seconds of computation per step (default: 0.2)")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="largest bucket in MiB (default: 25)")
    parser.add_argument("--codec", default="none", help="of gradients (default: none)")
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    arguments = parser.parse_args()
    if min(arguments.size, arguments.steps, arguments.megabits) < 1 or arguments.compute < 0:
        parser.error("--size, --steps, --megabits: expected positive numbers, --compute: 0 or more")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Launch an agent on each side and return the figures of rank 0."""
    program = [str(_RANK), "--size", str(arguments.size), "--steps", str(arguments.steps), "--codec", arguments.codec]
    program += ["--compute", str(arguments.compute), "--bucket-mb", str(arguments.bucket_mb)]
    with wire(arguments.megabits * 1_000_000) as ends:
        (record,) = records_of(launch_across(ends, program, port=_PORT, limit=_LIMIT))
    if not record["is_right"]:
        raise JobFailedError("parameters differ between the two sides or between ranks")
    return record


def verdict(record: dict[str, Any]) -> dict[str, Any]:
    """Return by what part steps are shorter, and whether that is enough."""
    shorter = 1.0 - record["ratio"]
    return {"shorter": round(shorter, 4), "is_reached": shorter >= _WANTED}


def main() -> int:
    """Measure and show what came out."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    try:
        record = measure(arguments)
    except NoNamespacesError as error:
        sys.stdout.write(f"skipped: {error}\n{json.dumps({'skipped': str(error)})}\n")
        return 0
    except JobFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    least = arguments.size / payload_rate(arguments.megabits * 1e6)
    sys.stdout.write(
        f"{arguments.size / 1e6:.0f} MB, {arguments.megabits} Mbit/s (the wire alone: {least:.3f} s), "
        f"{arguments.compute:g} s of computation, codec {arguments.codec}, {arguments.steps} steps of each side\n"
        f"optimizer behind the synchronization: {record['behind']:.3f} s per step\n"
        f"optimizer in the synchronization:     {record['in']:.3f} s per step\n"
        f"ratio: {record['ratio']:.3f} ({1 - record['ratio']:.1%} shorter)\n"
        f"{json.dumps(verdict(record))}\n"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
