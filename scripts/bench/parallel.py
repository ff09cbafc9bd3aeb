"""Pipelines, ZeRO and layouts of 3D-parallel training: what they take on this host, beside torch where it is.

    python scripts/bench/parallel.py --rounds 3                  # all parts
    python scripts/bench/parallel.py --parts hops,zero           # some of them
    python scripts/bench/parallel.py --parts layouts --install   # puts torch into an environment of its own

- ``schedules``: the real executor on virtual time (a forward pass takes 1 second, a backward pass 2, messages nothing).
- ``hops``: what the executor adds to a message between two stages that compute nothing; see parallel_hops.py.
- ``zero``: a step of each ZeRO stage, 2 replicas, 25 million values and next to no compute; see parallel_zero.py.
- ``layouts``: a step of the model of train_lm.py, with 4 layers, in each layout of 2 and 4 ranks, and beside it torch
  with DDP, FSDP2 and pipelining (Schedule1F1B) over Gloo: equal first values, batches and numbers of micro-batches,
  float32.

In every round all parts run one after the other, layouts and stages within a part step by step in turn.  A figure of a
round is the median over its steps on the slowest rank; shown are medians over rounds, of ratios within a round, too.
Every rank has one thread to compute in, on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import asyncpar
from asyncpar.nn import Transformer
from scripts.bench.environments import (
    DEFAULT_ENVIRONMENTS,
    JobFailedError,
    install,
    measure_gloo,
    python_of,
    run_together,
    version_of,
)
from scripts.bench.parallel_figures import (
    ALONE,
    PEERS,
    Figures,
    find_faults,
    hop_table,
    layout_table,
    peer_table,
    schedule_table,
    zero_table,
)
from scripts.bench.parallel_train import transformer_of
from scripts.bench.parallel_virtual import CASES, measure_case
from scripts.bench.peers.model_rules import Rules

PARTS = ("schedules", "hops", "zero", "layouts")
LANES = ("shm", "tcp")
LAYOUTS = {1: (ALONE,), 2: ("dp2", "tp2", "pp2", "dp2-zero3"), 4: ("dp4", "dp2xpp2", "dp2xtp2", "tp2xpp2")}
"""By number of ranks."""

_RANK = Path(__file__).with_name("parallel_rank.py")
_LIMIT = 200.0
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_HOP_SIZES = (4_000, 4_000_000)
_QUICK = {
    "rounds": 1, "steps": 1, "layers": 4, "dim": 16, "heads": 4, "seq": 8, "batch": 16, "micro_batches": 2,
    "values": 80_000, "lanes": "shm",
}  # fmt: skip
_FULL = {
    "rounds": 3, "steps": 5, "layers": 4, "dim": 128, "heads": 4, "seq": 64, "batch": 64, "micro_batches": 8,
    "values": 25_000_000, "lanes": ",".join(LANES),
}  # fmt: skip
_CAPTIONS = {
    "schedules": "4 ranks, 8 micro-batches, virtual time: makespan/ideal, bubble over ideal",
    "hops": "2 ranks, stages that compute nothing, microseconds; a micro-batch is two hops",
    "zero": "2 replicas, AdamW, next to no compute; ms of the slowest rank, MB of the worst",
    "layouts": "float32 transformer; shares of a step are means over ranks",
}
_DIFFERS = (
    "What differs: torch computes with kernels of its own (fused attention, AdamW),",
    "asyncpar with numpy. Gloo has TCP over loopback only. In a step asyncpar also",
    "agrees on loss and global norm, and makes sure that all ranks end it alike.",
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and ends with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--lanes", help="of asyncpar with 2 ranks (default: shm,tcp)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"forms of torch (default: {','.join(PEERS)})")
    parser.add_argument("--rounds", type=int, help=f"default: {_FULL['rounds']}")
    parser.add_argument("--steps", type=int, help=f"per round and layout or stage (default: {_FULL['steps']})")
    parser.add_argument("--micro-batches", type=int, help=f"of pipelines (default: {_FULL['micro_batches']})")
    for name in ("layers", "dim", "heads", "seq", "batch"):
        parser.add_argument(f"--{name}", type=int, help=f"as of train_lm.py (default: {_FULL[name]})")
    parser.add_argument("--values", type=int, help=f"of the model of zero (default: {_FULL['values']})")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: does it run at all?")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVIRONMENTS, help="folder of the peers' environments")
    parser.add_argument("--install", action="store_true", help="install torch there if it is missing, from PyPI")
    parser.add_argument("--json", type=Path, help="write all figures into this file, too")
    arguments = parser.parse_args(given)
    for name, default in (_QUICK if arguments.quick else _FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for name, known in (("parts", PARTS), ("lanes", LANES), ("peers", tuple(PEERS))):
        chosen = [one for one in getattr(arguments, name).split(",") if one]
        for one in chosen:
            if one not in known:
                parser.error(f"--{name}: expected some of {', '.join(known)}, got {one!r}")
        setattr(arguments, name, chosen)
    problem = _problem(arguments)
    if problem is not None:
        parser.error(problem)
    return arguments


def _problem(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with the sizes."""
    for name in ("rounds", "steps", "micro_batches", "layers", "dim", "heads", "seq", "batch", "values"):
        if getattr(arguments, name) < 1:
            return f"--{name.replace('_', '-')}: expected a positive number, got {getattr(arguments, name)}"
    if not arguments.parts:
        return f"--parts: expected some of {', '.join(PARTS)}, got none"
    if not arguments.lanes:
        return f"--lanes: expected some of {', '.join(LANES)}, got none"
    if arguments.layers < 2:
        return f"--layers: expected at least 2, one for each stage, got {arguments.layers}"
    if arguments.heads % 2 or arguments.dim % arguments.heads:
        return f"--heads: expected an even divisor of --dim {arguments.dim}, got {arguments.heads}"
    if arguments.batch % (2 * arguments.micro_batches) or arguments.batch % 4:
        most = f"2 replicas * {arguments.micro_batches} micro-batches"
        return f"--batch: expected a multiple of 4 and of {most}, got {arguments.batch}"
    if arguments.values < 64:
        return f"--values: expected at least 64, got {arguments.values}"
    return None


def rules_of(arguments: argparse.Namespace) -> Rules:
    """Return the sizes of the model and its batches."""
    return Rules(
        layers=arguments.layers,
        features=arguments.dim,
        heads=arguments.heads,
        length=arguments.seq,
        rows=arguments.batch,
        steps=arguments.steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to run in every round; ``run`` returns JSON lines."""

    title: str
    run: Callable[[], str]


def plan(arguments: argparse.Namespace, values: Path, *, has_torch: bool) -> Iterator[Job]:
    """Yield the jobs of a round, ``values`` being the file of the model's first values."""
    for lane in arguments.lanes:
        if "hops" in arguments.parts:
            many = ["--micro-batches=4", "--steps=1"] if arguments.quick else ["--micro-batches=16", "--steps=7"]
            hops = ["hops", "--sizes", *map(str, _HOP_SIZES), *many]
            yield _ours(f"hops over {lane}", 2, lane, hops)
        if "zero" in arguments.parts:
            zero = ["zero", f"--values={arguments.values}", f"--steps={arguments.steps}"]
            yield _ours(f"ZeRO over {lane}", 2, lane, zero)
    if "layouts" in arguments.parts:
        sizes = [*rules_of(arguments).as_arguments(), f"--micro-batches={arguments.micro_batches}"]
        for ranks, layouts in LAYOUTS.items():
            for lane in arguments.lanes if ranks == 2 else arguments.lanes[:1]:
                train = ["train", *sizes, "--layouts", *layouts]
                yield _ours(f"{', '.join(layouts)} over {lane}", ranks, lane, train)
        for form in arguments.peers if has_torch else ():
            yield Job(title=f"torch, {form}", run=_theirs(form, sizes, arguments.envs, values))


def _ours(title: str, ranks: int, lane: str, program: Sequence[str]) -> Job:
    launch = [sys.executable, "-m", "asyncpar", "launch", f"--nproc-per-node={ranks}", f"--transport={lane}"]
    command = [*launch, str(_RANK), *program]
    return Job(title=title, run=lambda: run_together([command], [os.environ | _ONE_THREAD], limit=_LIMIT))


def _theirs(form: str, sizes: Sequence[str], environments: Path, values: Path) -> Callable[[], str]:
    program = "torch_pipeline.py" if form == "pipeline" else "torch_fsdp.py"
    wanted = [*sizes, f"--values={values}"]
    if form != "pipeline":
        wanted += [f"--form={form}", "--micro-batches=1"]
    prefixes = [[str(python_of("gloo", environments))]] * (1 if form == ALONE else 2)
    return lambda: measure_gloo(prefixes, wanted, limit=_LIMIT, environment=_ONE_THREAD, program=program)


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


def measure(arguments: argparse.Namespace, figures: Figures, *, has_torch: bool) -> list[str]:
    """Run all rounds; return what failed."""
    failures = []
    if "schedules" in arguments.parts:
        tell("schedules on virtual time")
        for case in CASES:
            figures.add(0, measure_case(case))
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as directory:
        values = Path(directory) / "values.npz"
        parameters = Transformer(transformer_of(rules_of(arguments))).parameters()
        np.savez(values, **{parameter.name: parameter.value for parameter in parameters})  # type: ignore[arg-type]
        for turn in range(arguments.rounds):
            for job in plan(arguments, values, has_torch=has_torch):
                tell(f"round {turn + 1} of {arguments.rounds}: {job.title}")
                try:
                    lines = job.run().splitlines()
                except JobFailedError as error:
                    failures.append(f"{job.title}: {error}")
                    tell(failures[-1])
                    continue
                for line in lines:
                    if line.startswith("{"):
                        figures.add(turn, json.loads(line))
    return failures


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
            command = f"scripts/bench/parallel.py --parts {part}{options}"
            lines += ["", f"{command}:", _CAPTIONS[part]] if place == 0 else []
            lines += ["", *table]
    return lines


def describe(torch: str | None) -> str:
    """Return one sentence on what ran where."""
    return (
        f"asyncpar {asyncpar.__version__}, {f'torch {torch}' if torch else 'no torch'}; "
        f"{len(os.sched_getaffinity(0))} cores, one thread per rank, Python {platform.python_version()}"
    )


def tell(text: str) -> None:
    """Say how it goes, apart from the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> int:
    """Run everything that is asked for; Ctrl-C shows what there is so far."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch = find_torch(arguments)
    figures = Figures()
    failures: list[str] = []
    exit_code = 0
    try:
        failures = measure(arguments, figures, has_torch=torch is not None)
    except KeyboardInterrupt:
        exit_code = 130
    sys.stdout.write("\n".join(show(arguments, figures, describe(torch))) + "\n")
    faults = find_faults(figures)
    for fault in faults:
        tell(fault)
    if arguments.json is not None:
        records = [{"round": turn, **record} for turn, record in figures.records]
        document = {"description": describe(torch), "records": records, "failures": failures, "faults": faults}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return exit_code or int(bool(failures or faults))


if __name__ == "__main__":
    sys.exit(main())
