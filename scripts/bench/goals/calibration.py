"""Measure tuned gradient steps against the best pinned choice, on real lanes of five kinds.

    scripts/bench/run calibration
    scripts/bench/run calibration --kinds shm,tcp --sizes 65536,1048576 --steps 50 --rounds 7

Kinds: ``shm`` four ranks that share memory, ``tcp`` four ranks over loopback TCP, ``1000`` and ``100`` two network
namespaces with a rank each on a wire of so many Mbit/s, ``hosts`` two namespaces with two ranks each on 1 Gbit/s.
Ranks measure their lanes as they meet (``ASYNCPAR_CALIBRATE=on``).  For each size of gradients they take ``--steps``
tuned steps, with ``--compute`` seconds of nothing before each.  Then the choice that was found and every pinned one
take turns, ``--rounds`` times, and then the choice and the three quickest pins, three times as often: those times
count, as the least of dozens of medians is one that was lucky.  Shown are the medians on the slowest rank, and the part
of the time of the tuned steps that trials have cost.  Pins that are expected to be three times slower than the best are
left out.  The last line is one JSON object with the verdict over all cases.  Needs root, ip and tc for the last three
kinds; says so where namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.jobs import LAUNCH, ONE_THREAD, JobFailedError, launch_across, records_of, run_together
from scripts.bench.namespaces import NoNamespacesError, wire

_RANK = Path(__file__).with_name("calibration_rank.py")
_PORT = 29_420
_LIMIT = 1800.0
_WIRES = {"1000": (1000, 1), "100": (100, 1), "hosts": (1000, 2)}
"""Mbit/s, and ranks on each side."""

KINDS = ("shm", "tcp", *_WIRES)
_WITHIN = 1.1


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of lanes (default: {','.join(KINDS)})")
    parser.add_argument("--sizes", default="65536,1048576,16777216", help="bytes of gradients, several by commas")
    parser.add_argument("--steps", type=int, default=50, help="tuned steps (default: 50)")
    parser.add_argument("--rounds", type=int, default=7, help="steps with each choice afterwards (default: 7)")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds before each step (default: 0)")
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    arguments = parser.parse_args()
    unknown = set(arguments.kinds.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"--kinds: expected some of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    if not all(size.isdecimal() and int(size) >= 4 for size in arguments.sizes.split(",")):
        parser.error(f"--sizes: expected numbers of bytes from 4, got {arguments.sizes}")
    if min(arguments.steps, arguments.rounds) < 1 or arguments.compute < 0:
        parser.error("--steps, --rounds: expected positive numbers, --compute: 0 or more")
    return arguments


def _run(kind: str, program: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return what rank 0 prints on lanes of one kind."""
    if kind not in _WIRES:
        lane = ["--transport", "tcp"] if kind == "tcp" else []
        command = [*LAUNCH, "--nproc-per-node", "4", *lane, *program]
        return run_together([command], [os.environ | ONE_THREAD | dict(variables)], limit=_LIMIT)
    megabits, ranks = _WIRES[kind]
    with wire(megabits * 1_000_000) as ends:
        options = ["--nproc-per-node", str(ranks)]
        return launch_across(ends, program, port=_PORT, limit=_LIMIT, options=options, environment=variables)


def measure(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of rank 0, one record for each size."""
    program = [str(_RANK), "--sizes", arguments.sizes, "--steps", str(arguments.steps)]
    program += ["--rounds", str(arguments.rounds), "--compute", str(arguments.compute)]
    with tempfile.TemporaryDirectory() as cache:  # other lanes, the same names
        return records_of(_run(kind, program, {"ASYNCPAR_CALIBRATE": "on", "XDG_CACHE_HOME": cache}))


def show(kind: str, record: dict[str, Any]) -> float:
    """Write one line; return how many times as long as the best pin the choice takes."""
    times: dict[str, float] = record["final"]
    best, tuned = min(times, key=lambda name: times[name]), times[record["choice"]]
    ratio = tuned / times[best]
    sys.stdout.write(
        f"{kind:6} {record['size']:>10,} B  tuned {record['choice']:<22} {tuned * 1e3:9.3f} ms   "
        f"best {best:<22} {times[best] * 1e3:9.3f} ms   {ratio:5.3f}   trials {record['lost']:.2%}\n"
    )
    sys.stdout.flush()
    return ratio


def verdict(ratios: dict[str, list[float]], skipped: Sequence[str]) -> dict[str, Any]:
    """Return what came out over all kinds; ``ratios`` are of the choice to the best pin, by kind."""
    every = [ratio for of in ratios.values() for ratio in of]
    return {
        "within": sum(ratio <= _WITHIN for ratio in every),
        "cases": len(every),
        "is_reached": bool(every) and max(every) <= _WITHIN,
        "worst": {kind: round(max(of), 3) for kind, of in ratios.items() if of},
        "skipped": list(skipped),
    }


def main() -> int:
    """Measure and show what came out."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    found: dict[str, list[dict[str, Any]]] = {}
    ratios: dict[str, list[float]] = {}
    skipped: list[str] = []
    sys.stdout.write(f"{os.cpu_count()} cores, {arguments.steps} tuned steps, {arguments.rounds} of each choice\n")
    for kind in arguments.kinds.split(","):
        try:
            found[kind] = measure(kind, arguments)
        except NoNamespacesError as error:
            sys.stdout.write(f"{kind}: skipped: {error}\n")
            skipped.append(kind)
            continue
        except JobFailedError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        except KeyboardInterrupt:
            return 130
        ratios[kind] = [show(kind, record) for record in found[kind]]
    came = verdict(ratios, skipped)
    sys.stdout.write(f"within a tenth of the best pinned choice: {came['within']} of {came['cases']}\n")
    sys.stdout.write(f"{json.dumps(came)}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
