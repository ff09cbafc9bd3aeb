"""Measure asyncpar, Gloo (torch) and three MPI libraries (mpi4py) side by side on this host, in one run.

    scripts/bench/run compare --install                        # everything; installs the peers first, once
    scripts/bench/run compare --ops all_reduce --ranks 2 --sizes 4,1MB,25MB --rounds 5
    scripts/bench/run compare --transport tcp --peers gloo --ops all_reduce --ranks 2

Each peer has a virtual environment of its own below --envs.  In every round all sides run one after the other, so that
a slow spell of the machine hits all of them.  The figure of a round is the median over the iterations on the slowest
rank, see scripts/bench/peers/rules.py, which `asyncpar bench` keeps, too; what is shown is the median over the rounds.
MPI works in place where the operation can.  Every side has its own defaults.  Tables and verdicts go to stdout and to
OUT/compare.md, all figures to OUT/compare.json.  Exits with 1 when a side fails or has a wrong element.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar
from asyncpar.bench.settings import OPERATIONS
from asyncpar.bench.sizes import parse_size
from asyncpar.core.config.transport import TRANSPORTS
from asyncpar.errors import UsageError
from scripts.bench.compare.comparison import (
    LANE_TARGETS,
    OURS,
    TARGETS,
    TITLES,
    Job,
    Results,
    judge,
    results_tables,
    verdict_table,
)
from scripts.bench.environments import DEFAULT_ENVIRONMENTS, ENVIRONMENTS, install, measure_peer, version_of
from scripts.bench.jobs import JobFailedError, records_of, run, tell
from scripts.bench.options import some_of

_OPERATIONS = tuple(operation for operation in OPERATIONS if operation != "all_reduce_many")
"""What peers have, too."""

_SIZES = "4,64,1K,8K,64K,256K,1MB,4MB,25MB,100MB"
_LIMIT = 900.0
_GLANCE = 0.3
_BUSY_PERCENT = 10.0


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One run of the script."""

    sides: tuple[str, ...]
    sizes: tuple[int, ...]
    budget: float
    transport: str | None
    environments: Path
    patience: float = 0.0
    results: Results = field(default_factory=Results)
    failures: list[str] = field(default_factory=list)
    lanes: set[str] = field(default_factory=set)
    """What asyncpar's ranks were joined by."""

    def play_round(self, op: str, ranks: int) -> None:
        """Run one operation on all sides, one after the other."""
        for side in self.sides:
            await_idle(self.patience)
            try:
                records = self._ours(op, ranks) if side == OURS else self._theirs(side, op, ranks)
            except JobFailedError as error:
                self.failures.append(f"{side}, {op}, {ranks} ranks: {error}")
                tell(self.failures[-1])
                continue
            for size, seconds, wrong in records:
                self.results.add(Job(ranks, op, size), side, seconds, wrong=wrong)

    def _ours(self, op: str, ranks: int) -> list[tuple[int, float, int]]:
        command = [
            sys.executable,
            "-m",
            "asyncpar",
            "bench",
            op,
            f"--nproc={ranks}",
            "--json",
            f"--budget={self.budget}",
        ]
        command.append(f"--sizes={','.join(map(str, self.sizes))}")
        if self.transport is not None:
            command.append(f"--transport={self.transport}")
        document = json.loads(run(command, limit=_LIMIT))
        self.lanes.add(document["surroundings"]["lane"])
        return [(row["size"], row["time_us"] / 1e6, row["wrong"]) for row in document["measurements"]]

    def _theirs(self, side: str, op: str, ranks: int) -> list[tuple[int, float, int]]:
        sizes = ",".join(map(str, self.sizes))
        arguments = ["--ops", op, "--sizes", sizes, "--budget", str(self.budget)]
        output = measure_peer(side, self.environments, ranks=ranks, arguments=arguments, limit=_LIMIT)
        return [(record["size"], record["seconds"], record["wrong"]) for record in records_of(output)]


def await_idle(patience: float) -> None:
    """Wait until nothing else keeps the processors busy, for ``patience`` seconds at most."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and psutil.cpu_percent(interval=_GLANCE) > _BUSY_PERCENT:
        pass


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(_OPERATIONS), help="operations, separated by commas (default: all)")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--sizes", default=_SIZES, help=f"sizes of the whole buffer (default: {_SIZES})")
    parser.add_argument("--peers", default=",".join(ENVIRONMENTS), help="libraries beside asyncpar (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per size and round (default: 0.3)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds to wait each time for an idle machine (default: 0)",
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="pin asyncpar's lane")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVIRONMENTS, help="folder of the peers' environments")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing, from PyPI")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for compare.md and compare.json")
    arguments = parser.parse_args()
    arguments.ops = some_of(parser, "--ops", arguments.ops, OPERATIONS)
    arguments.peers = some_of(parser, "--peers", arguments.peers, tuple(ENVIRONMENTS), may_be_none=True)
    try:
        arguments.ranks = [int(ranks) for ranks in arguments.ranks.split(",")]
        arguments.sizes = tuple(parse_size("--sizes", size) for size in arguments.sizes.split(","))
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    if arguments.rounds < 1 or min(arguments.ranks) < 1 or not arguments.budget > 0:
        parser.error("--rounds, --ranks, --budget: expected positive numbers")
    return arguments


def find_peers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the peers that there are; installs them if that is asked for."""
    versions = {}
    for peer in arguments.peers:
        if arguments.install and version_of(peer, arguments.envs) is None:
            tell(f"installing {TITLES[peer]} into {arguments.envs / peer}")
            install(peer, arguments.envs)
        version = version_of(peer, arguments.envs)
        if version is None:
            tell(f"{TITLES[peer]} is left out: not in {arguments.envs / peer}; --install puts it there")
        else:
            versions[peer] = version
    return versions


def describe(comparison: Comparison, versions: dict[str, str], rounds: int) -> str:
    """Return one sentence on what ran where."""
    peers = ", ".join(f"{TITLES[peer]} ({ENVIRONMENTS[peer].shown} {version})" for peer, version in versions.items())
    lanes = " and ".join(sorted(comparison.lanes)) or "no"
    return (
        f"asyncpar {asyncpar.__version__} ({lanes} lanes), {peers or 'no peers'}; "
        f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}; "
        f"medians of {rounds} interleaved rounds."
    )


def write_out(comparison: Comparison, versions: dict[str, str], arguments: argparse.Namespace) -> None:
    """Show the tables and write the files."""
    ours = f"asyncpar, {arguments.transport}" if arguments.transport else "asyncpar"
    targets = LANE_TARGETS if arguments.transport == "tcp" else TARGETS
    verdicts = judge(comparison.results, targets if arguments.transport in (None, "tcp") else ())
    lines = [
        describe(comparison, versions, arguments.rounds),
        "",
        *results_tables(comparison.results, comparison.sides, ours=ours),
    ]
    lines += [*verdict_table(verdicts), ""] if verdicts else []
    sys.stdout.write("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "compare.md").write_text("\n".join(lines))
    document = {
        "description": lines[0],
        "versions": versions,
        "transport": arguments.transport,
        "lanes": sorted(comparison.lanes),
        "results": [
            {"ranks": job.ranks, "op": job.op, "size": job.size, "seconds": sides}
            for job, sides in comparison.results.rounds.items()
        ],
        "verdicts": [
            {
                "op": verdict.op,
                "ranks": verdict.ranks,
                "sizes": verdict.target.sizes,
                "peer": verdict.target.side,
                "wanted": verdict.target.wanted,
                "reached": verdict.reached,
                "at": verdict.at,
                "ok": verdict.is_reached,
            }
            for verdict in verdicts
        ],
        "failures": comparison.failures,
        "wrong": comparison.results.wrong,
    }
    (arguments.out / "compare.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Run everything that is asked for; Ctrl-C shows what there is so far."""
    arguments = parse_arguments()
    try:
        versions = find_peers(arguments)
    except JobFailedError as error:
        tell(str(error))
        return 1
    comparison = Comparison(
        sides=(OURS, *versions),
        sizes=arguments.sizes,
        budget=arguments.budget,
        transport=arguments.transport,
        environments=arguments.envs,
        patience=arguments.patience,
    )
    plan = [(ranks, op, turn) for ranks in arguments.ranks for op in arguments.ops for turn in range(arguments.rounds)]
    exit_code = 0
    try:
        for done, (ranks, op, turn) in enumerate(plan, 1):
            load = os.getloadavg()[0]
            tell(f"{done}/{len(plan)}: {op}, {ranks} ranks, round {turn + 1} of {arguments.rounds} (load {load:.1f})")
            comparison.play_round(op, ranks)
    except KeyboardInterrupt:
        exit_code = 130
    write_out(comparison, versions, arguments)
    if any(comparison.results.wrong.values()):
        tell(f"wrong elements: {comparison.results.wrong}")
    return exit_code or int(bool(comparison.failures) or any(comparison.results.wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
