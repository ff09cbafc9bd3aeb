"""Measure pipelines, ZeRO and layouts of 3D-parallel training on this host, beside torch if it is installed.

    scripts/bench/run parallel --rounds 3                  # all parts
    scripts/bench/run parallel --parts hops,zero           # some of them
    scripts/bench/run parallel --parts layouts --install   # puts torch into an environment of its own

- ``schedules``: the real executor on virtual time (a forward pass takes 1 second, a backward pass 2, messages nothing).
- ``hops``: what the executor adds to a message between two stages that compute nothing; see parallel_hops.py.
- ``zero``: a step of each ZeRO stage, 2 replicas, 25 million values and next to no compute; see parallel_zero.py.  All
  stages have equal slots in shared memory, as each has in a process of its own.
- ``layouts``: a step of the model of train_lm.py, with 4 layers, in each layout of 2 and 4 ranks, and beside it torch
  with DDP, FSDP2 and pipelining (Schedule1F1B) over Gloo: equal first values, batches and numbers of micro-batches,
  float32.

In every round all parts run one after the other, layouts and stages within a part step by step in turn.  A figure of a
round is the median over its steps on the slowest rank; shown are medians over rounds, of ratios within a round, too.
Every rank has one thread to compute in, on both sides, beside those that communicate.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

import asyncpar
from asyncpar.nn import Transformer
from scripts.bench.compare.parallel_figures import (
    ALONE,
    find_faults,
    hop_table,
    layout_table,
    peer_table,
    schedule_table,
    zero_table,
)
from scripts.bench.compare.parallel_options import parse_arguments, rules_of
from scripts.bench.compare.parallel_train import transformer_of
from scripts.bench.compare.parallel_virtual import CASES, measure_case
from scripts.bench.environments import install, measure_gloo, python_of, version_of
from scripts.bench.jobs import LAUNCH, ONE_THREAD, JobFailedError, records_of, run_together, tell
from scripts.bench.rounds import Figures, Job, Record, play, report

LAYOUTS = {1: (ALONE,), 2: ("dp2", "tp2", "pp2", "dp2-zero3"), 4: ("dp4", "dp2xpp2", "dp2xtp2", "tp2xpp2")}
"""By number of ranks."""

NO_MORE: Mapping[str, str] = MappingProxyType({})
ROOM_FOR_ALL: Mapping[str, str] = MappingProxyType({"ASYNCPAR_ARENA_BYTES": "64M"})
"""Shared memory for the groups of all stages of ZeRO in one process.

Of the 8 MB that there are by default each group takes half of what the ones before it have left, so that stage 3, whose
groups are made last, had to move its values in the smallest pieces.  A job has one stage, and room for it.
"""

_RANK = Path(__file__).with_name("parallel_rank.py")
_LIMIT = 200.0
_HOP_SIZES = (4_000, 4_000_000)
_CAPTIONS = {
    "schedules": "4 ranks, 8 micro-batches: virtual makespan/ideal, bubble over ideal, peaks",
    "hops": "2 ranks, no compute; us of a raw round trip, and of a micro-batch (two hops)",
    "zero": "2 replicas, AdamW, hardly any compute; the slowest rank's ms, the worst's MB",
    "layouts": "float32 transformer; speedup over one process, shares in the mean over ranks",
}
_DIFFERS = (
    "What differs: torch computes with kernels of its own (fused attention, AdamW),",
    "asyncpar with numpy. Gloo has TCP over loopback only. In a step asyncpar also",
    "agrees on loss and global norm, and makes sure that all ranks end it alike.",
)


def plan(arguments: argparse.Namespace, values: Path, *, has_torch: bool) -> Iterator[Job]:
    """Yield the jobs of a round, ``values`` being the file of the model's first values."""
    for lane in arguments.lanes:
        if "hops" in arguments.parts:
            many = ["--micro-batches=4", "--steps=1"] if arguments.quick else ["--micro-batches=16", "--steps=7"]
            hops = ["hops", "--sizes", *map(str, _HOP_SIZES), *many]
            yield _ours(f"hops over {lane}", 2, lane, hops)
        if "zero" in arguments.parts:
            zero = ["zero", f"--values={arguments.values}", f"--steps={arguments.steps}"]
            yield _ours(f"ZeRO over {lane}", 2, lane, zero, ROOM_FOR_ALL)
    if "layouts" in arguments.parts:
        sizes = [*rules_of(arguments).as_arguments(), f"--micro-batches={arguments.micro_batches}"]
        for ranks, layouts in LAYOUTS.items():
            for lane in arguments.lanes if ranks == 2 else arguments.lanes[:1]:
                train = ["train", *sizes, "--layouts", *layouts]
                yield _ours(f"{', '.join(layouts)} over {lane}", ranks, lane, train)
        for form in arguments.peers if has_torch else ():
            yield Job(title=f"torch, {form}", run=_theirs(form, sizes, arguments.envs, values))


def _ours(title: str, ranks: int, lane: str, program: Sequence[str], variables: Mapping[str, str] = NO_MORE) -> Job:
    launch = [*LAUNCH, f"--nproc-per-node={ranks}", f"--transport={lane}"]
    command = [*launch, str(_RANK), *program]
    environment = {**os.environ, **ONE_THREAD, **variables}
    return Job(title=title, run=lambda: records_of(run_together([command], [environment], limit=_LIMIT)))


def _theirs(form: str, sizes: Sequence[str], environments: Path, values: Path) -> Callable[[], Sequence[Record]]:
    program = "torch_pipeline.py" if form == "pipeline" else "torch_fsdp.py"
    wanted = [*sizes, f"--values={values}"]
    if form != "pipeline":
        wanted += [f"--form={form}", "--micro-batches=1"]
    prefixes = [[str(python_of("gloo", environments))]] * (1 if form == ALONE else 2)
    return lambda: records_of(measure_gloo(prefixes, wanted, limit=_LIMIT, environment=ONE_THREAD, program=program))


def find_torch(arguments: argparse.Namespace) -> str | None:
    """Return the version of torch that is there; installs it if that is asked for."""
    if "layouts" not in arguments.parts or not arguments.peers:
        return None
    version = version_of("gloo", arguments.envs)
    if version is None and arguments.install:
        tell(f"installing torch into {arguments.envs / 'gloo'}")
        try:
            install("gloo", arguments.envs)
        except JobFailedError as error:
            tell(f"torch cannot be installed here: {error}")
        version = version_of("gloo", arguments.envs)
    if version is None:
        tell(f"torch is left out: not in {arguments.envs / 'gloo'}; --install puts it there")
    return version


def measure(arguments: argparse.Namespace, figures: Figures, failures: list[str], *, has_torch: bool) -> None:
    """Run all rounds; what failed is added to ``failures``."""
    if "schedules" in arguments.parts:
        tell("schedules on virtual time")
        for case in CASES:
            figures.add(0, measure_case(case))
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as directory:
        values = Path(directory) / "values.npz"
        parameters = Transformer(transformer_of(rules_of(arguments))).parameters()
        np.savez(values, **{parameter.name: parameter.value for parameter in parameters})  # type: ignore[arg-type]
        for turn in range(arguments.rounds):
            jobs = plan(arguments, values, has_torch=has_torch)
            play(jobs, figures, failures, turn=turn, rounds=arguments.rounds)


def show(arguments: argparse.Namespace, figures: Figures, description: str) -> list[str]:
    """Return the tables, each with the command that makes it."""
    tokens = rules_of(arguments).tokens
    peers = peer_table(figures, tokens)
    tables = {
        "schedules": [schedule_table(figures)],
        "hops": [hop_table(figures)],
        "zero": [zero_table(figures)],
        "layouts": [layout_table(figures, tokens), [*peers, "", *_DIFFERS] if peers else []],
    }
    lines = [description]
    for part, shown in tables.items():
        for place, table in enumerate(filter(None, shown)):
            options = " --quick" if arguments.quick else f" --rounds {arguments.rounds}"
            command = f"scripts/bench/run parallel --parts {part}{options}"
            lines += ["", f"{command}:", _CAPTIONS[part]] if place == 0 else []
            lines += ["", *table]
    return lines


def describe(torch: str | None) -> str:
    """Return one sentence on what ran where."""
    return (
        f"asyncpar {asyncpar.__version__}, {f'torch {torch}' if torch else 'no torch'}; "
        f"{len(os.sched_getaffinity(0))} cores, one thread per rank, Python {platform.python_version()}"
    )


def main() -> int:
    """Run everything that is asked for; Ctrl-C shows what there is so far."""
    arguments = parse_arguments(description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch = find_torch(arguments)
    figures = Figures()
    failures: list[str] = []
    exit_code = 0
    try:
        measure(arguments, figures, failures, has_torch=torch is not None)
    except KeyboardInterrupt:
        exit_code = 130
    description = describe(torch)
    sys.stdout.write("\n".join(show(arguments, figures, description)) + "\n")
    faults = find_faults(figures)
    found = report(figures, arguments.json, description=description, failures=failures, faults=faults)
    return exit_code or found


if __name__ == "__main__":
    sys.exit(main())
