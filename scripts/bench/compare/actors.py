"""Measure actors of asyncpar beside those of xoscar, Ray and Monarch: two processes of a host, the same work for all.

    scripts/bench/run actors                        # asyncpar alone, or beside what is installed
    scripts/bench/run actors --install --rounds 5   # the peers go into environments of their own, from PyPI
    scripts/bench/run actors --soak 2000000         # and does memory stay flat?

Each library runs in its own processes, one after the other, round after round, by the rules of
``peers/actor_rules.py``; every answer is checked.  Shown are medians over the rounds (of the median call), ratios of
the same run, and whether the project's targets are met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar
from asyncpar.bench.sizes import parse_size
from asyncpar.errors import UsageError
from scripts.bench.compare.actor_figures import TITLES, Figures, figure_table, judge, soak_table, verdict_table
from scripts.bench.compare.comparison import OURS
from scripts.bench.environments import ACTOR_ENVIRONMENTS, DEFAULT_ENVIRONMENTS, install, measure_actors, version_of
from scripts.bench.jobs import LAUNCH, JobFailedError, records_of, run, tell
from scripts.bench.options import some_of
from scripts.bench.peers.actor_rules import FIRST_BYTES

FIGURES = ("ask", "concurrent", "concurrent 1000", "first", "array", "local", "idle")
_RANK = Path(__file__).with_name("actors_rank.py")
_LIMIT = 300.0
_SOAK_SECONDS_PER_ASK = 500e-6


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", default=",".join(FIGURES), help="what to measure, by commas (default: all)")
    parser.add_argument("--sizes", default="1MB,64MB", help="sizes of arrays (default: 1MB,64MB)")
    parser.add_argument("--idle", type=int, default=10_000, help="idle actors (default: 10000)")
    parser.add_argument("--first", type=int, default=FIRST_BYTES, help="bytes of the first messages of a pair")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="ask asyncpar N times and watch its memory")
    parser.add_argument("--peers", default=",".join(ACTOR_ENVIRONMENTS), help="libraries beside us (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per figure and round (default: 1)")
    parser.add_argument("--transport", help="pin asyncpar's lane: shm, tcp, grpc")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVIRONMENTS, help="folder of the peers' environments")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing, from PyPI")
    parser.add_argument("--json", type=Path, help="write all figures there, too")
    arguments = parser.parse_args()
    arguments.figures = some_of(parser, "--figures", arguments.figures, FIGURES, may_be_none=True)
    arguments.peers = some_of(parser, "--peers", arguments.peers, tuple(ACTOR_ENVIRONMENTS), may_be_none=True)
    try:
        arguments.sizes = [parse_size("--sizes", size) for size in arguments.sizes.split(",")]
    except UsageError as error:
        parser.error(str(error))
    least = min(*arguments.sizes, arguments.rounds, arguments.idle, arguments.first)
    if least < 1 or not arguments.budget > 0:
        parser.error("--rounds, --sizes, --idle, --first, --budget: expected positive numbers")
    if 0 < arguments.soak < 1000 or arguments.soak < 0:
        parser.error(f"--soak: expected at least 1000 asks, got {arguments.soak}")
    return arguments


def find_peers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the peers that there are; installs them if that is asked for."""
    versions = {}
    for peer in arguments.peers:
        if arguments.install and version_of(peer, arguments.envs) is None:
            tell(f"installing {TITLES[peer]} into {arguments.envs / peer}")
            try:
                install(peer, arguments.envs)
            except JobFailedError as error:
                tell(f"{TITLES[peer]} cannot be installed here: {error}")
        version = version_of(peer, arguments.envs)
        if version is None:
            tell(f"{TITLES[peer]} is left out: not in {arguments.envs / peer}; --install puts it there")
        else:
            versions[peer] = version
    return versions


def measure_ours(arguments: argparse.Namespace, wanted: Sequence[str], *, soak: int = 0) -> str:
    """Launch two ranks and return what rank 0 prints."""
    launch = [*LAUNCH, "--nproc-per-node=2"]
    if arguments.transport is not None:
        launch.append(f"--transport={arguments.transport}")
    soaking = [f"--soak={soak}"] if soak else []
    return run([*launch, str(_RANK), *wanted, *soaking], limit=_LIMIT + soak * _SOAK_SECONDS_PER_ASK)


def play(arguments: argparse.Namespace, side: str, figures: Figures, *, soak: int = 0) -> None:
    """Let one side measure all figures.  Raises ``JobFailedError``."""
    wanted = ["--figures", "" if soak else ",".join(arguments.figures), "--budget", str(arguments.budget)]
    wanted += [
        "--sizes",
        ",".join(map(str, arguments.sizes)),
        "--idle",
        str(arguments.idle),
        "--first",
        str(arguments.first),
    ]
    if side == OURS:
        output = measure_ours(arguments, wanted, soak=soak)
    else:
        output = measure_actors(side, arguments.envs, arguments=wanted, limit=_LIMIT)
    for record in records_of(output):
        figures.add(side, record)


def describe(arguments: argparse.Namespace, versions: dict[str, str]) -> str:
    """Return one sentence on what ran where."""
    shown = ACTOR_ENVIRONMENTS
    peers = ", ".join(f"{TITLES[peer]} ({shown[peer].shown} {version})" for peer, version in versions.items())
    lane = f" over {arguments.transport}" if arguments.transport else ""
    return (
        f"asyncpar {asyncpar.__version__}{lane}, {peers or 'no peers'}; {len(os.sched_getaffinity(0))} cores, "
        f"{platform.machine()}, Python {platform.python_version()}; medians of {arguments.rounds} interleaved rounds."
    )


def write_out(arguments: argparse.Namespace, versions: dict[str, str], figures: Figures, failures: list[str]) -> None:
    """Show the tables and write the file."""
    verdicts = judge(figures)
    lines = [describe(arguments, versions)]
    for table in (figure_table(figures), soak_table(figures), verdict_table(verdicts) if verdicts else []):
        lines += ["", *table] if table else []
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json is not None:
        document = {
            "description": lines[0],
            "versions": versions,
            "records": figures.records,
            "ratios": {
                figure: {side: figures.ratio(figure, side) for side in figures.sides if side != OURS}
                for figure in figures.records
            },
            "verdicts": [
                {"what": one.what, "wanted": one.wanted, "reached": one.reached, "ok": one.is_reached}
                for one in verdicts
            ],
            "failures": failures,
            "wrong": figures.wrong,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Run everything that is asked for; Ctrl-C shows what there is so far."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    versions = find_peers(arguments)
    figures = Figures()
    failures: list[str] = []
    plan = [(side, turn, 0) for turn in range(arguments.rounds) for side in (OURS, *versions)]
    plan += [(OURS, 0, arguments.soak)] if arguments.soak else []
    exit_code = 0
    try:
        for side, turn, soak in plan if arguments.figures else plan[-1:]:
            tell(f"{TITLES[side]}, {f'{soak:,} asks' if soak else f'round {turn + 1} of {arguments.rounds}'}")
            try:
                play(arguments, side, figures, soak=soak)
            except JobFailedError as error:
                failures.append(f"{TITLES[side]}: {error}")
                tell(failures[-1])
    except KeyboardInterrupt:
        exit_code = 130
    write_out(arguments, versions, figures, failures)
    if figures.wrong:
        tell(f"wrong answers: {figures.wrong}")
    return exit_code or int(bool(failures) or bool(figures.wrong))


if __name__ == "__main__":
    sys.exit(main())
