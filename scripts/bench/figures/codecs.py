"""Measure the speed of each codec on one core, its ratio to float32, and its error.

    scripts/bench/run codecs --size 100MB --rounds 7 [--codecs int8,topk:0.01+int8] [--json codecs.json]

The values are normal deviates.  Timed are encoding with error feedback, decoding, and decoding and adding, in turn, in
processor time of the only thread, which on a quiet machine is the time that passes.  Printed are GB/s of float32 (the
median of the rounds), how many times smaller the encoded form is, and the norm of what it misses over that of the
values.  Where a speed is wanted, the table says whether it was reached, and the exit status is 1 if one was not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from asyncpar.bench.sizes import parse_size
from asyncpar.codecs import Codec, Values, parse_codec
from asyncpar.errors import UsageError

CODECS = "none,bf16,fp16,int8,int4,sign,topk:0.01,topk:0.01+int8,randomk:0.01"
ROUNDS = 7

WANTED: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "int8": {"encode": 3.0, "decode_add": 5.0},
        "bf16": {"encode": 4.0, "decode": 4.0},
        "topk:0.01": {"encode": 1.0},
    }
)
"""GB/s of float32, per codec.  That of bf16 is without feedback: it needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of one codec: GB/s of float32, and two ratios."""

    codec: str
    encode: float
    encode_with_feedback: float
    decode: float
    decode_add: float
    times_smaller: float
    relative_error: float

    def judge(self) -> list[tuple[str, float, float]]:
        """Return what is wanted of the codec: of what, how much, and how much there was."""
        feedback = self.codec != "bf16"
        had = {"encode": self.encode_with_feedback if feedback else self.encode}
        had |= {"decode": self.decode, "decode_add": self.decode_add}
        return [(kind, wanted, had[kind]) for kind, wanted in WANTED.get(self.codec, {}).items()]


def measure(codec: Codec, values: Values, rounds: int) -> Figures:
    """Run one codec ``rounds`` times over ``values``, and once before to warm it up."""
    encoded = np.empty(codec.encoded_bytes(values.size), np.uint8)
    residual, decoded = np.zeros_like(values), np.zeros_like(values)
    codec.encode(values, encoded)
    codec.decode(encoded, decoded)
    error = np.linalg.norm(values - decoded) / np.linalg.norm(values)
    operations: dict[str, Callable[[], None]] = {
        "encode": lambda: codec.encode(values, encoded),
        "encode_with_feedback": lambda: codec.encode(values, encoded, residual=residual, lost=residual),
        "decode": lambda: codec.decode(encoded, decoded),
        "decode_add": lambda: codec.decode_add(encoded, decoded),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(rounds + 1):
        for name, operation in operations.items():
            began = time.thread_time()
            operation()
            if turn:
                seconds[name].append(time.thread_time() - began)
    speeds = {name: values.nbytes / max(statistics.median(taken), 1e-9) / 1e9 for name, taken in seconds.items()}
    smaller = values.nbytes / encoded.size
    return Figures(codec=codec.name, times_smaller=smaller, relative_error=float(error), **speeds)


def show(figures: list[Figures], size: int) -> list[str]:
    """Return the lines of the table."""
    lines = [f"{size} bytes of float32, one core; GB/s of float32"]
    titles = ("encode", "+feedback", "decode", "+add", "smaller", "error")
    lines.append(f"{'codec':<18}" + "".join(f"{title:>11}" for title in titles) + "  wanted")
    for row in figures:
        speeds = (row.encode, row.encode_with_feedback, row.decode, row.decode_add)
        columns = [f"{speed:.2f}" for speed in speeds] + [f"{row.times_smaller:.2f}x", f"{row.relative_error:.5f}"]
        verdicts = [f"{kind} {wanted:g}: {'ok' if had >= wanted else 'short'}" for kind, wanted, had in row.judge()]
        lines.append(f"{row.codec:<18}" + "".join(f"{text:>11}" for text in columns) + "  " + ", ".join(verdicts))
    return [line.rstrip() for line in lines]


def is_fast_enough(figures: list[Figures]) -> bool:
    """Was every speed reached that is wanted?"""
    return all(had >= wanted for row in figures for _, wanted, had in row.judge())


def parse_codecs(text: str) -> list[Codec]:
    """Return the codecs of a list of names with commas between.  Raises ``UsageError``."""
    codecs = []
    for name in text.split(","):
        codec = parse_codec(name)
        if not isinstance(codec, Codec):
            raise UsageError(f"--codecs: expected codecs of single vectors, got {codec.name}")
        codecs.append(codec)
    return codecs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100MB", help="bytes of float32 (default: 100MB)")
    parser.add_argument("--codecs", default=CODECS, help=f"names with commas between (default: {CODECS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often to measure (default: {ROUNDS})")
    parser.add_argument("--json", type=Path, help="where to write the figures as well")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {arguments.rounds}")
    try:
        size, codecs = parse_size("--size", arguments.size), parse_codecs(arguments.codecs)
    except UsageError as error:
        parser.error(str(error))
    values = np.random.default_rng(0).standard_normal(max(size // 4, 1), np.float32)
    figures = [measure(codec, values, arguments.rounds) for codec in codecs]
    print("\n".join(show(figures, values.nbytes)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bytes": values.nbytes, "codecs": [asdict(row) for row in figures]}))
    return 0 if is_fast_enough(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
