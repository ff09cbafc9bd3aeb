"""Measure DistributedDataParallel and FSDP2 on asyncpar's process group, beside Gloo's, in one run.

    scripts/test-backends --version                  # makes .venv-backends, which has torch and asyncpar
    scripts/bench/run torch_ddp
    scripts/bench/run torch_ddp --parts calls --ranks 2

Sides: ``gloo`` and ``asyncpar``, under torch's DistributedDataParallel and FSDP2, and ``zero-copy``: asyncpar's own
DistributedDataParallel, and FSDP2 with buffers in memory that ranks share.
Parts: ``calls`` (collectives one by one, and beside them asyncpar without torch by `asyncpar bench`, which keeps the
same rules), ``ddp`` and ``fsdp`` (steps of a transformer with AdamW on the ranks of this host), ``link`` (DDP between
two network namespaces over a wire of --megabits, as it is and with --codec).  Each side runs in
processes of its own with one thread per rank, in every round one after the other, in the next round the other way
round.  A figure of a round is the median on the slowest rank; shown are medians over rounds, and of ratios to Gloo in
the same round.

``without comm.`` is the same step in ``no_sync()``, for FSDP2 that of the model as it is; ``exposed`` is what the step
takes more than that; ``comm. alone`` are the all-reduces of DDP's buckets, or FSDP2's exchanges of shards, with nothing
beside them.  Exits with 1 when a side fails, has a wrong element or a loss that differs.  The link needs root, ip and
tc, and is left out otherwise.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar
from scripts.bench.compare.comparison import OURS
from scripts.bench.compare.torch_ddp_figures import NATIVE, call_tables, find_faults, judge, step_table
from scripts.bench.compare.torch_ddp_options import ZERO_COPY, parse_arguments
from scripts.bench.jobs import ONE_THREAD, records_of, run, run_ranks, tell
from scripts.bench.namespaces import DEVICE, End, NoNamespacesError, wire
from scripts.bench.rounds import Figures, Job, Record, play, report

_RANK = Path(__file__).with_name("torch_ddp_rank.py")
_LIMIT = 600.0
_LEAST_NATIVE_BUDGET = 0.05


def start(
    prefixes: Sequence[Sequence[str]], options: Sequence[str], surroundings: Mapping[str, str] | None = None
) -> Sequence[Record]:
    """Run a rank with each of the command ``prefixes`` and return the records of rank 0."""
    environment = ONE_THREAD | dict(surroundings or {})
    program = [sys.executable, str(_RANK), *options]
    return records_of(run_ranks(prefixes, program, limit=_LIMIT, environment=environment))


def start_native(ranks: int, arguments: argparse.Namespace) -> Sequence[Record]:
    """Run `asyncpar bench` and return records like those of a rank."""
    sizes = ",".join(map(str, arguments.sizes))
    budget = max(arguments.budget, _LEAST_NATIVE_BUDGET)
    command = [sys.executable, "-m", "asyncpar", "bench", "all_reduce", f"--nproc={ranks}", "--json"]
    document = json.loads(run([*command, f"--sizes={sizes}", f"--budget={budget}"], limit=_LIMIT))
    return [
        {
            "what": "call",
            "op": "all_reduce",
            "size": row["size"],
            "seconds": row["time_us"] / 1e6,
            "wrong": row["wrong"],
        }
        for row in document["measurements"]
    ]


def plan_host(arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield what runs on this host in a round."""
    parts = [part for part in arguments.parts if part != "link"]
    if not parts:
        return
    program = ["--parts", ",".join(parts), "--models", ",".join(arguments.models)]
    program += ["--sizes", ",".join(map(str, arguments.sizes)), "--budget", str(arguments.budget)]
    for ranks in arguments.ranks:
        marks = {"where": "host", "ranks": ranks}
        for side in arguments.sides:
            wanted = [*program, "--backend", side]
            if side == ZERO_COPY:
                steps = [part for part in parts if part in ("ddp", "fsdp")]
                wanted = [*program, "--backend", OURS, "--zero-copy", "--parts", ",".join(steps)]
                if not steps:
                    continue
            yield Job(
                title=f"{side}, {ranks} ranks",
                run=lambda ranks=ranks, wanted=wanted: start([[]] * ranks, wanted),  # type: ignore[misc]
                marks={**marks, "side": side},
            )
        if "calls" in parts and OURS in arguments.sides:
            yield Job(
                title=f"asyncpar without torch, {ranks} ranks",
                run=lambda ranks=ranks: start_native(ranks, arguments),  # type: ignore[misc]
                marks={**marks, "side": NATIVE},
            )


def plan_link(arguments: argparse.Namespace, ends: tuple[End, End]) -> Iterator[Job]:
    """Yield what runs over the wire in a round."""
    program = ["--parts", "ddp", "--models", ",".join(arguments.models), "--budget", str(arguments.budget)]
    surroundings = {"GLOO_SOCKET_IFNAME": DEVICE, "MASTER_ADDR": ends[0].address}
    own = [side for side in arguments.sides if side in (OURS, ZERO_COPY)]
    forms: list[tuple[str, str | None]] = [(side, None) for side in arguments.sides]
    for side, codec in [*forms, *((side, arguments.codec) for side in own)]:
        name = side if codec is None else f"{side} {codec}"
        wanted = [*program, "--backend", OURS if side == ZERO_COPY else side]
        wanted += ["--zero-copy"] if side == ZERO_COPY else []
        wanted += [] if codec is None else ["--codec", codec]
        yield Job(
            title=f"{name}, {arguments.megabits} Mbit/s",
            run=lambda wanted=wanted: start(  # type: ignore[misc]
                [end.enter([]) for end in ends], wanted, surroundings
            ),
            marks={"where": f"{arguments.megabits} Mbit/s", "ranks": 2, "side": name},
        )


def measure(arguments: argparse.Namespace, figures: Figures, failures: list[str]) -> None:
    """Run all rounds; what failed is added to ``failures``."""
    _play(list(plan_host(arguments)), arguments.rounds, figures, failures)
    if "link" not in arguments.parts:
        return
    try:
        with wire(arguments.megabits * 1_000_000) as ends:
            _play(list(plan_link(arguments, ends)), arguments.rounds, figures, failures)
    except NoNamespacesError as error:
        tell(f"the link is left out: {error}")


def _play(jobs: Sequence[Job], rounds: int, figures: Figures, failures: list[str]) -> None:
    for turn in range(rounds):
        play(jobs if turn % 2 == 0 else reversed(jobs), figures, failures, turn=turn, rounds=rounds)


def describe(arguments: argparse.Namespace) -> str:
    """Return one sentence on what ran where."""
    return (
        f"asyncpar {asyncpar.__version__}, torch {importlib.metadata.version('torch')}; "
        f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"one thread per rank; medians of {arguments.rounds} interleaved rounds."
    )


def main() -> int:
    """Run everything that is asked for; Ctrl-C shows what there is so far."""
    arguments = parse_arguments(description=__doc__)
    if importlib.util.find_spec("torch") is None:
        tell(f"there is no torch beside {sys.executable}: expected the environment of scripts/test-backends")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    figures = Figures()
    failures: list[str] = []
    exit_code = 0
    try:
        measure(arguments, figures, failures)
    except KeyboardInterrupt:
        exit_code = 130
    verdicts = [str(verdict) for verdict in judge(figures)]
    lines = [describe(arguments), "", *call_tables(figures), *step_table(figures), *verdicts]
    sys.stdout.write("\n".join(lines) + "\n")
    faults = find_faults(figures)
    found = report(figures, arguments.json, description=lines[0], verdicts=verdicts, failures=failures, faults=faults)
    return exit_code or found


if __name__ == "__main__":
    sys.exit(main())
