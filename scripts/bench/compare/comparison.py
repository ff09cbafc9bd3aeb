"""Figures of several libraries side by side: medians over rounds, ratios, tables and targets.  Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scripts.bench.tables import format_ratio, format_size, format_time, markdown

OURS = "asyncpar"
GLOO = "gloo"
MPIS = ("mpich", "openmpi", "intel")
BEST_MPI = "best MPI"
TITLES = {OURS: "asyncpar", GLOO: "Gloo", "mpich": "MPICH", "openmpi": "Open MPI", "intel": "Intel MPI"}

_MOVES = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
_KB, _MB = 1_000, 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """What was measured: an operation on a whole buffer of ``size`` bytes among ``ranks``."""

    ranks: int
    op: str
    size: int


@dataclass(slots=True)
class Results:
    """Seconds of each job and side, one figure per round."""

    rounds: dict[Job, dict[str, list[float]]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    """By side: how many figures came with wrong elements."""

    def add(self, job: Job, side: str, seconds: float, *, wrong: int) -> None:
        self.rounds.setdefault(job, {}).setdefault(side, []).append(seconds)
        self.wrong[side] = self.wrong.get(side, 0) + (wrong > 0)

    def median(self, job: Job, side: str) -> float | None:
        """Return the median over the rounds; for the best MPI that of the best of them at this size."""
        sides = MPIS if side == BEST_MPI else (side,)
        medians = [statistics.median(seconds) for one in sides if (seconds := self.rounds.get(job, {}).get(one))]
        return min(medians, default=None)

    def ratio(self, job: Job, side: str) -> float | None:
        """Return how many times faster than ``side`` we are; None where one of the two has no figure."""
        ours, theirs = self.median(job, OURS), self.median(job, side)
        return None if ours is None or theirs is None or not ours > 0 else theirs / ours

    def groups(self) -> list[tuple[int, str, list[Job]]]:
        """Return the jobs by ranks and operation, in the order in which they came, sizes ascending."""
        keys = dict.fromkeys((job.ranks, job.op) for job in self.rounds)
        return [
            (ranks, op, sorted(job for job in self.rounds if (job.ranks, job.op) == (ranks, op))) for ranks, op in keys
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """At least ``wanted`` times as fast as ``side`` at every size for which ``applies``."""

    ops: tuple[str, ...]
    side: str
    sizes: str
    applies: Callable[[int], bool]
    wanted: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a target for one operation and number of ranks: the worst ratio, and the size where it occurred."""

    target: Target
    ranks: int
    op: str
    reached: float
    at: int

    @property
    def is_reached(self) -> bool:
        return self.reached >= self.target.wanted


def _from(low: float, high: float = math.inf) -> Callable[[int], bool]:
    return lambda size: low <= size <= high


def _near(size: int) -> Callable[[int], bool]:
    return _from(0.95 * size, 1.06 * size)


_ALL_REDUCE = ("all_reduce",)
TARGETS = (
    Target(ops=_ALL_REDUCE, side=GLOO, sizes="every size", applies=_from(0), wanted=5.0, ranks=(2,)),
    Target(ops=_ALL_REDUCE, side=BEST_MPI, sizes="below 64 KB", applies=_from(0, 63_999), wanted=0.1, ranks=(2,)),
    Target(
        ops=_ALL_REDUCE, side=BEST_MPI, sizes="64 KB to 1 MB", applies=_from(64 * _KB, 1 << 20), wanted=0.5, ranks=(2,)
    ),
    Target(
        ops=_ALL_REDUCE, side=BEST_MPI, sizes="64 KB to 4 MB", applies=_from(64 * _KB, 4 << 20), wanted=0.5, ranks=(4,)
    ),
    Target(ops=_ALL_REDUCE, side=BEST_MPI, sizes="from 4 MB", applies=_from(4 * _MB), wanted=1.0, ranks=(2,)),
    Target(ops=_ALL_REDUCE, side=BEST_MPI, sizes="25 MB", applies=_near(25 * _MB), wanted=1.2, ranks=(2,)),
    Target(ops=_ALL_REDUCE, side=BEST_MPI, sizes="100 MB", applies=_near(100 * _MB), wanted=2.5, ranks=(2,)),
    Target(ops=_ALL_REDUCE, side=GLOO, sizes="every size", applies=_from(0), wanted=2.5, ranks=(4,)),
    Target(ops=_ALL_REDUCE, side=BEST_MPI, sizes="25 MB", applies=_near(25 * _MB), wanted=1.0, ranks=(4,)),
    Target(ops=_ALL_REDUCE, side=BEST_MPI, sizes="100 MB", applies=_near(100 * _MB), wanted=1.3, ranks=(4,)),
    Target(ops=_MOVES, side=GLOO, sizes="1 MB", applies=_near(_MB), wanted=3.0, ranks=(2, 4)),
    Target(ops=_MOVES, side=GLOO, sizes="25 MB", applies=_near(25 * _MB), wanted=3.0, ranks=(2, 4)),
)
"""Same host, any lane."""

LANE_TARGETS = (
    Target(ops=_ALL_REDUCE, side=GLOO, sizes="up to 64 KB", applies=_from(0, 1 << 16), wanted=1.5, ranks=(2,)),
    Target(ops=_ALL_REDUCE, side=GLOO, sizes="from 1 MB", applies=_from(_MB), wanted=1.0, ranks=(2,)),
)
"""With the TCP lane alone."""


def judge(results: Results, targets: Iterable[Target]) -> list[Verdict]:
    """Return the verdicts on all targets for which there are figures."""
    verdicts = []
    for target in targets:
        for ranks, op, jobs in results.groups():
            if ranks not in target.ranks or op not in target.ops:
                continue
            ratios = [
                (ratio, job.size)
                for job in jobs
                if target.applies(job.size) and (ratio := results.ratio(job, target.side)) is not None
            ]
            if ratios:
                reached, at = min(ratios)
                verdicts.append(Verdict(target=target, ranks=ranks, op=op, reached=reached, at=at))
    return verdicts


def results_tables(results: Results, sides: Sequence[str], *, ours: str = "asyncpar") -> list[str]:
    """Return a markdown table per number of ranks and operation; times in microseconds, ratios to us."""
    compared = [*([GLOO] if GLOO in sides else []), *([BEST_MPI] if set(sides) & set(MPIS) else [])]
    titles = [
        "size",
        *(f"{ours if side == OURS else TITLES[side]} (us)" for side in sides),
        *(f"{TITLES.get(side, side)} / {ours}" for side in compared),
    ]
    lines: list[str] = []
    for ranks, op, jobs in results.groups():
        rows = [
            [
                format_size(job.size) if job.size else "-",
                *(format_time(results.median(job, side)) for side in sides),
                *(format_ratio(results.ratio(job, side)) for side in compared),
            ]
            for job in jobs
        ]
        lines += [f"{op}, {ranks} ranks:", "", *markdown([titles, *rows]), ""]
    return lines


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a markdown table of what was to be reached, and what was."""
    titles = ["operation", "ranks", "sizes", "peer", "wanted", "reached", "at", ""]
    rows = [
        [
            verdict.op,
            str(verdict.ranks),
            verdict.target.sizes,
            TITLES.get(verdict.target.side, verdict.target.side),
            f"{verdict.target.wanted:g}x",
            format_ratio(verdict.reached),
            format_size(verdict.at),
            "ok" if verdict.is_reached else "short",
        ]
        for verdict in verdicts
    ]
    return markdown([titles, *rows])
