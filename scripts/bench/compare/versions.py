"""Compare this checkout with another one of asyncpar: operations, asks, steps, and starts of jobs.

    git worktree add ../before v0.1.0
    scripts/bench/run versions ../before

In each round both versions measure everything, one after the other, and the next round begins with the other one.
Medians are shown, and what this version takes of the time of the other one within a round: 1.10x is slower.  Ranks of
both run on this Python, each with the package of its checkout.  Elastic steps are those in which nothing happens, of
two ranks; a join is from the loss of a rank to the first step of the one in its place, its start included; a start is a
whole job, from its command to its exit.  DDP is left out where torch is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.jobs import LAUNCH, ONE_THREAD, records_of, run_together
from scripts.bench.options import Parser, check_target, some_of
from scripts.bench.rounds import Figures, Job, Record, play, report
from scripts.bench.tables import format_ratio, format_time, markdown

ROOT = Path(__file__).resolve().parents[3]
_RANK = Path(__file__).with_name("versions_rank.py")
_SIZES = "4,4096,65536,1048576,26214400,104857600"
_LIMIT = 300.0
_OLD, _NEW = "other", "this"
_TORCH = "DDP of torch"

PARTS: dict[str, tuple[Sequence[str], str, int, str]] = {
    "all_reduce": ((), "all_reduce", 2, _SIZES),
    "all_reduce of 4 ranks": ((), "all_reduce", 4, _SIZES),
    "all_reduce over TCP": (("--transport", "tcp"), "all_reduce", 2, _SIZES),
    "asks over TCP": (("--transport", "tcp"), "asks", 2, ""),
    "gradient steps": ((), "gradients", 2, ""),
    "steps of ZeRO": ((), "zero", 2, ""),
    _TORCH: ((), "ddp", 2, ""),
    "elastic steps": (("--elastic", "ranks"), "elastic", 2, ""),
    "join": (("--elastic", "ranks", "--max-restarts", "1"), "join", 2, ""),
    "start": ((), "start", 4, ""),
}
"""By title: options of the launcher, the part that ranks run, their number, and sizes in bytes."""


def measure(checkout: Path, title: str, *, seconds: float, step_size: int) -> Iterable[Record]:
    """Run a part with the package of ``checkout``; return its cells, or the time of the job for a start."""
    options, part, ranks, sizes = PARTS[title]
    python, *launch = LAUNCH
    command = [python, "-P", *launch]  # without it the package of the current directory comes first
    command += [f"--nproc-per-node={ranks}", *options, str(_RANK), part]
    command += ["--seconds", str(seconds), "--step-size", str(step_size), *(["--sizes", sizes] if sizes else [])]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(checkout)}
    begun = time.perf_counter()
    records = records_of(run_together([command], [environment], limit=_LIMIT))
    if part == "start":
        records.append({"what": "cell", "name": f"start of {ranks} ranks", "seconds": time.perf_counter() - begun})
    return [{**record, "part": title} for record in records]


def show(figures: Figures) -> str:
    """Return the table of all cells."""
    samples = figures.samples("cell", ("part", "name", "version"), "seconds")
    cells = list(dict.fromkeys(key[:2] for key in samples.rounds))
    rows = [["part", "what", "other, us", "this, us", "ratio"]]
    for part, name in cells:
        new, old = (part, name, _NEW), (part, name, _OLD)
        times = (format_time(samples.median(key)) for key in (old, new))
        rows.append([part, name, *times, format_ratio(samples.ratio(new, old))])
    return "\n".join(markdown(rows))


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between  [all]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both versions  [5]")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long to repeat each operation  [1]")
    parser.add_argument("--step-size", type=int, default=25 << 20, help="bytes of gradients of a step  [26214400]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures into a file")
    options = parser.parse_args()
    if not (options.other / "asyncpar" / "__init__.py").is_file():
        parser.error(f"other: expected a checkout of asyncpar, got {options.other}")
    if options.rounds < 1 or options.seconds <= 0.0 or options.step_size < 1024:
        parser.error("--rounds, --seconds, --step-size: expected 1 or more, more than 0, and 1024 or more")
    parts = some_of(parser, "--parts", options.parts, list(PARTS))
    check_target(parser, "--json", options.json)
    if _TORCH in parts and importlib.util.find_spec("torch") is None:
        print(f"left out, since torch is not installed: {_TORCH}", file=sys.stderr)
        parts.remove(_TORCH)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    checkouts = {_OLD: options.other.resolve(), _NEW: ROOT}
    figures, failures = Figures(), list[str]()
    for turn in range(options.rounds):
        versions = [_OLD, _NEW] if turn % 2 == 0 else [_NEW, _OLD]
        jobs = [
            Job(
                title=f"{part}, {version} version",
                run=partial(measure, checkouts[version], part, seconds=options.seconds, step_size=options.step_size),
                marks={"version": version},
            )
            for part in parts
            for version in versions
        ]
        play(jobs, figures, failures, turn=turn, rounds=options.rounds)
    print(show(figures))
    return report(figures, options.json, description="two versions of asyncpar", failures=failures, faults=[])


if __name__ == "__main__":
    sys.exit(main())
