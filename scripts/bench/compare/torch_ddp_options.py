"""The options of ``torch_ddp.py``, and the sizes of its transformers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncpar.bench.sizes import parse_size
from asyncpar.errors import UsageError
from scripts.bench.options import Parser, check_target, fill, some_of

PARTS = ("calls", "ddp", "fsdp", "link")
VOCABULARY = 256
ZERO_COPY = "zero-copy"
"""The side of ``asyncpar.torch.DistributedDataParallel``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A byte-level transformer, and one rank's part of a batch: ``rows`` sequences of ``length``."""

    layers: int
    features: int
    heads: int
    rows: int
    length: int


SIZES = {
    "tiny": Size(layers=2, features=32, heads=2, rows=2, length=8),
    "small": Size(layers=4, features=256, heads=4, rows=4, length=64),
    "large": Size(layers=8, features=512, heads=8, rows=2, length=32),
}
"""13 MB and 101 MB of gradients in float32; tiny is for trying whether it runs."""

_QUICK = {
    "ranks": "2", "models": "tiny", "sizes": "4,64K", "rounds": 1, "budget": 0.02, "megabits": 1000, "codec": "int8",
}  # fmt: skip
_FULL = {
    "ranks": "2,4", "models": "small,large", "sizes": "4,1K,64K,1MB,4MB,25MB,100MB", "rounds": 3, "budget": 0.5,
    "megabits": 1000, "codec": "int8",
}  # fmt: skip


def parse_arguments(given: Sequence[str] | None = None, *, description: str | None = None) -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--ranks", help=f"numbers of ranks on this host (default: {_FULL['ranks']})")
    parser.add_argument("--models", help=f"some of {', '.join(SIZES)} (default: {_FULL['models']})")
    parser.add_argument("--sizes", help=f"bytes of all_reduce (default: {_FULL['sizes']})")
    parser.add_argument("--rounds", type=int, help=f"default: {_FULL['rounds']}")
    parser.add_argument("--budget", type=float, help=f"seconds per figure and round (default: {_FULL['budget']})")
    parser.add_argument("--megabits", type=int, help=f"speed of the link (default: {_FULL['megabits']})")
    parser.add_argument("--codec", help=f"of the gradient hook on the link (default: {_FULL['codec']})")
    parser.add_argument("--sides", default=f"gloo,asyncpar,{ZERO_COPY}", help=f"default: gloo,asyncpar,{ZERO_COPY}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: does it run at all?")
    parser.add_argument("--json", type=Path, help="write all figures into this file, too")
    arguments = parser.parse_args(given)
    fill(arguments, _QUICK if arguments.quick else _FULL)
    for name, known in (("parts", PARTS), ("models", tuple(SIZES)), ("sides", ("gloo", "asyncpar", ZERO_COPY))):
        setattr(arguments, name, some_of(parser, f"--{name}", getattr(arguments, name), known))
    try:
        arguments.ranks = [int(ranks) for ranks in arguments.ranks.split(",")]
        arguments.sizes = [parse_size("--sizes", size) for size in arguments.sizes.split(",")]
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    if min(*arguments.ranks, arguments.rounds, arguments.megabits) < 1 or not arguments.budget > 0:
        parser.error("--ranks, --rounds, --megabits, --budget: expected positive numbers")
    check_target(parser, "--json", arguments.json)
    return arguments
