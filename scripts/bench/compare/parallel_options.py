"""The options of ``parallel.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.compare.parallel_figures import PEERS
from scripts.bench.environments import DEFAULT_ENVIRONMENTS
from scripts.bench.options import Parser, check_target, fill, some_of
from scripts.bench.peers.model_rules import Rules

PARTS = ("schedules", "hops", "zero", "layouts")
LANES = ("shm", "tcp")

_QUICK = {
    "rounds": 1, "steps": 1, "layers": 4, "dim": 16, "heads": 4, "seq": 8, "batch": 16, "micro_batches": 2,
    "values": 80_000, "lanes": "shm",
}  # fmt: skip
_FULL = {
    "rounds": 3, "steps": 5, "layers": 4, "dim": 128, "heads": 4, "seq": 64, "batch": 64, "micro_batches": 8,
    "values": 25_000_000, "lanes": ",".join(LANES),
}  # fmt: skip


def parse_arguments(given: Sequence[str] | None = None, *, description: str | None = None) -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    fill(arguments, _QUICK if arguments.quick else _FULL)
    arguments.parts = some_of(parser, "--parts", arguments.parts, PARTS)
    arguments.lanes = some_of(parser, "--lanes", arguments.lanes, LANES)
    arguments.peers = some_of(parser, "--peers", arguments.peers, tuple(PEERS), may_be_none=True)
    problem = _problem(arguments)
    if problem is not None:
        parser.error(problem)
    check_target(parser, "--json", arguments.json)
    return arguments


def _problem(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with the sizes."""
    for name in ("rounds", "steps", "micro_batches", "layers", "dim", "heads", "seq", "batch", "values"):
        if getattr(arguments, name) < 1:
            return f"--{name.replace('_', '-')}: expected a positive number, got {getattr(arguments, name)}"
    if arguments.layers % 2:
        return f"--layers: expected an even number, half of them for each stage, got {arguments.layers}"
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
