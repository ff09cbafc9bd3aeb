"""The rules by which every peer is measured, the same as `asyncpar bench` keeps (see ``asyncpar/bench``).

Runs in the peers' environments, where asyncpar is not installed: numpy and the standard library only.

A size is the whole buffer of an operation in bytes, as in nccl-tests: the larger of what a rank gives and gets.  Per
size: one operation on known values, every element of the result compared; two more; one that is timed, by which the
ranks agree on a number of iterations that fills the budget; a tenth as many to warm up; the iterations, each timed on
every rank; and one more comparison.  The time of a size is the median over the iterations on the rank on which that is
largest.  Operations with a root start behind a barrier, outside of the time, since roots that need not wait would run
ahead; the others follow one another at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ROOT = 0
ROOTED = ("broadcast", "reduce", "gather", "scatter")
WHOLE = ("all_reduce", "broadcast", "reduce")
"""Operations in which every rank holds the whole buffer; in the others each has a share, or a share for each."""

LEAST_ITERATIONS = 5
MOST_ITERATIONS = 10_000

_PERIOD = 61
_STRIDE = 7

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one size, as one rank sees it: what it gives, what it gets (maybe the same), what is right."""

    op: str
    rank: int
    ranks: int
    count: int
    source: Array
    target: Array

    @property
    def share(self) -> int:
        """Elements per rank."""
        return self.count // self.ranks

    @property
    def gets(self) -> bool:
        """Does this rank get a result?"""
        return self.rank == ROOT or self.op not in ("reduce", "gather")

    def fill(self) -> None:
        """Write the known values."""
        self.target[...] = -1
        if self.op != "broadcast" or self.rank == ROOT:
            self.source[...] = _ramp(_STRIDE * self.rank, self.source.size)

    def clear(self) -> None:
        """Write zeros, which stay zeros whatever is done with them."""
        self.source[...] = 0
        self.target[...] = 0

    def wrong(self) -> int:
        """Return how many elements differ from what they should be."""
        return int(np.count_nonzero(self.target != self._expected())) if self.gets else 0

    def _expected(self) -> Array:
        share, everyone = self.share, range(self.ranks)
        match self.op:
            case "all_reduce" | "reduce":
                return _total(self.ranks, 0, self.count)
            case "reduce_scatter":
                return _total(self.ranks, self.rank * share, share)
            case "all_gather" | "gather":
                return np.concatenate([_ramp(_STRIDE * rank, share) for rank in everyone])
            case "all_to_all":
                return np.concatenate([_ramp(_STRIDE * rank + self.rank * share, share) for rank in everyone])
            case "scatter":
                return _ramp(_STRIDE * ROOT + self.rank * share, share)
        return _ramp(_STRIDE * ROOT, self.count)


def make_case(op: str, size: int, *, rank: int, ranks: int) -> Case:
    """Allocate the arrays of a case; a size that cannot be shared out evenly is rounded down, to a share of one."""
    count = max(size // 4, 1)
    if op == "barrier":
        count = 0
    elif op not in WHOLE:
        count = max(count // ranks, 1) * ranks
    share = count // ranks
    has_share = {"all_gather": "source", "gather": "source", "reduce_scatter": "target", "scatter": "target"}
    source = np.zeros(share if has_share.get(op) == "source" else count, np.float32)
    got = share if has_share.get(op) == "target" else count
    target = source if op in WHOLE else np.zeros(got, np.float32)
    return Case(op=op, rank=rank, ranks=ranks, count=count, source=source, target=target)


def _ramp(start: int, count: int) -> Array:
    period = (np.arange(_PERIOD) + start) % _PERIOD
    return np.resize(period.astype(np.float32), count)


def _total(ranks: int, start: int, count: int) -> Array:
    period = sum(_ramp(start + _STRIDE * rank, _PERIOD) for rank in range(ranks))
    return np.resize(period, count)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a library does: ``calls[op](case)`` returns the call to time; ``largest`` is the maximum over ranks."""

    rank: int
    ranks: int
    calls: Mapping[str, Callable[[Case], Callable[[], object]]]
    barrier: Callable[[], object]
    largest: Callable[[float], float]


def measure(peer: Peer, case: Case, *, budget: float) -> dict[str, object]:
    """Return the record of one size."""
    call = peer.calls[case.op](case)
    prepare = peer.barrier if case.op in ROOTED else _nothing
    wrong = _checked(peer, case, call)
    once = 0.0
    for _ in range(3):
        prepare()
        started = time.perf_counter()
        call()
        once = time.perf_counter() - started
    iterations = int(min(max(budget / max(peer.largest(once), 1e-9), LEAST_ITERATIONS), MOST_ITERATIONS))
    for _ in range(iterations // 10):
        prepare()
        call()
    times = []
    for _ in range(iterations):
        prepare()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    seconds = peer.largest(statistics.median(times))
    wrong = max(wrong, _checked(peer, case, call))
    return {
        "op": case.op,
        "size": case.count * 4,
        "seconds": seconds,
        "iterations": iterations,
        "wrong": int(peer.largest(wrong)),
    }


def _checked(peer: Peer, case: Case, call: Callable[[], object]) -> int:
    """Run once on known values and return the wrong elements of this rank; leave zeros behind."""
    case.fill()
    peer.barrier()
    call()
    wrong = case.wrong() if case.op != "barrier" else 0
    peer.barrier()
    case.clear()
    peer.barrier()
    return wrong


def _nothing() -> None:
    return


def run(make_peer: Callable[[], Peer]) -> None:
    """Be one rank of a peer: measure what the command line asks for; rank 0 prints a JSON object per line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", required=True)
    parser.add_argument("--sizes", required=True, help="bytes, separated by commas")
    parser.add_argument("--budget", type=float, required=True, help="seconds per size")
    arguments = parser.parse_args()
    peer = make_peer()
    for op in arguments.ops.split(","):
        sizes = [0] if op == "barrier" else [int(size) for size in arguments.sizes.split(",")]
        for size in sizes if op in peer.calls else ():
            case = make_case(op, size, rank=peer.rank, ranks=peer.ranks)
            record = measure(peer, case, budget=arguments.budget)
            if peer.rank == 0:
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
