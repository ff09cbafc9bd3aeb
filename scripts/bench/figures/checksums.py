"""Measure the cost of checksums between two hosts: the same all-reduce with and without those of payloads.

    scripts/bench/run checksums
    scripts/bench/run checksums --megabits 10000 --rounds 9

Two network namespaces with a rank in each, shaped in both directions, as in ``link.py``; float32 gradients are averaged
by ``GradientSynchronizer`` (see link_rank.py).  In every round both sides run one after the other, which goes first
changes.  A figure is the median over the iterations of a round on the slowest rank; shown are the medians over rounds,
and the ratio of the two.  Needs root, ip and tc; says so and ends with 0 where namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.jobs import JobFailedError, launch_across, records_of
from scripts.bench.namespaces import End, NoNamespacesError, wire

_RANK = Path(__file__).resolve().parents[1] / "compare" / "link_rank.py"
_PORT = 29_410
_LIMIT = 120.0


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=25_000_000, help="bytes of float32 (default: 25000000)")
    parser.add_argument("--megabits", default="1000,10000", help="speeds of the wire (default: 1000,10000)")
    parser.add_argument("--transport", choices=["tcp", "grpc"], default="tcp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per side and round, in which at least three")
    arguments = parser.parse_args()
    try:
        arguments.megabits = [int(speed) for speed in arguments.megabits.split(",")]
    except ValueError as error:
        parser.error(f"--megabits: {error}")
    if min(arguments.size, arguments.rounds, *arguments.megabits) < 1 or not arguments.budget > 0:
        parser.error("--size, --megabits, --rounds, --budget: expected positive numbers")
    return arguments


def measure(ends: tuple[End, End], arguments: argparse.Namespace, setting: str) -> float:
    """Return the seconds of an all-reduce with ``ASYNCPAR_CHECKSUMS`` set to ``setting``."""
    program = [str(_RANK), "--size", str(arguments.size), "--budget", str(arguments.budget)]
    output = launch_across(
        ends,
        program,
        port=_PORT,
        limit=_LIMIT,
        options=["--transport", arguments.transport],
        environment={"ASYNCPAR_CHECKSUMS": setting},
    )
    (record,) = records_of(output)
    if record["wrong"]:
        raise JobFailedError(f"the means are wrong on {record['wrong']} ranks")
    return float(record["seconds"])


def main() -> int:
    """Run all rounds and show what came out."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    try:
        for megabits in arguments.megabits:
            seconds: dict[str, list[float]] = {"on": [], "off": []}
            with wire(megabits * 1_000_000) as ends:
                for turn in range(arguments.rounds):
                    for setting in ("on", "off") if turn % 2 else ("off", "on"):
                        seconds[setting].append(measure(ends, arguments, setting))
            with_them, without = (statistics.median(seconds[setting]) for setting in ("on", "off"))
            sys.stdout.write(
                f"{megabits} Mbit/s, {arguments.transport}, {arguments.size} bytes: {with_them * 1e3:.1f} ms with "
                f"checksums of payloads, {without * 1e3:.1f} ms without: {100 * (with_them / without - 1):+.1f} %\n"
            )
            sys.stdout.flush()
    except NoNamespacesError as error:
        sys.stdout.write(f"skipped: {error}\n")
    except JobFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
