"""Judge a siege: what ranks have committed, why each of them has ended, and how long nothing was committed.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from scripts.bench.chaos.chaos_agents import CUTS
from scripts.bench.chaos.chaos_judge import Logs, judge
from scripts.bench.chaos.endurance import other_lineages

MOST_GAP = 10.0
"""Seconds without a commit, after all faults have healed, that are too many."""

AFTERMATH = 5.0
"""Seconds after a fault has healed for which the loss of a rank is put down to it."""

TRACEBACK = "Traceback (most recent call last)"
_CRASHED = re.compile(r": rank \S+/\d+ (?:exited with code|was killed by)|: \S+ is killed: ")
_DECLARED = re.compile(r": rank (?P<host>\S+)/\d+ (?:is ended|starts again): (?P<why>.*)")
_DISMISSED = "the others have gone on without this host"
_ALL_LOST = "all members are lost"


@dataclass(frozen=True, slots=True)
class Line:
    """What the agent of a host, or the launcher, has printed, and when that was seen."""

    time: float
    source: str
    number: int
    text: str


@dataclass(slots=True)
class Hit:
    """What was done to a host, from when until when."""

    fault: int
    host: str
    what: str
    began: float
    healed: float


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a commit while no fault lasted."""

    began: float
    seconds: float
    fault: int
    """The number of the fault before it, -1: none."""


@dataclass
class SiegeVerdict:
    """What was wrong, by judge: empty lists if nothing was."""

    different: list[str] = field(default_factory=list)
    """Parameters, losses or samples that are not those of the run without faults."""
    repeated: list[str] = field(default_factory=list)
    """Committed steps that were repeated or lost."""
    split: list[str] = field(default_factory=list)
    """Steps that were committed with different digests."""
    crashes: list[str] = field(default_factory=list)
    """Ranks that have ended by themselves."""
    tracebacks: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    """Ranks that were declared lost though no fault had hit them."""
    gaps: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Why the run has not come to its end."""
    lines: list[Line] = field(default_factory=list)
    """Lines to be looked at."""

    @property
    def troubles(self) -> dict[str, list[str]]:
        """All that was wrong, by judge."""
        names = ("different", "repeated", "split", "crashes", "tracebacks", "unaccounted", "gaps", "ended")
        return {name: found for name in names if (found := getattr(self, name))}


def judge_siege(
    logs: Logs,
    lines: Sequence[Line],
    hits: Sequence[Hit],
    *,
    lineages: Sequence[str],
    portions: int,
    until: float,
    most_gap: float = MOST_GAP,
) -> SiegeVerdict:
    """Judge a run that was watched ``until`` then; ``lineages`` are those of the run without faults, by step."""
    verdict = SiegeVerdict()
    found = judge(logs, {}, {}, steps=logs.position, portions=portions, is_whole=False)
    verdict.repeated += found.repeated
    verdict.different += [*found.samples, *other_lineages(logs, lineages)]
    verdict.split += split_steps(logs)
    _judge_lines(lines, hits, verdict)
    for gap in quiet_gaps(logs, hits, until=until):
        if gap.seconds > most_gap:
            verdict.gaps.append(f"no commit for {gap.seconds:.1f} s after fault {gap.fault} had healed")
    return verdict


def split_steps(logs: Logs) -> list[str]:
    """Return the steps that were committed with different digests, and by whom."""
    digests: dict[int, dict[str, list[str]]] = {}
    for name, line in logs.of("committed"):
        digests.setdefault(line["step"], {}).setdefault(line["lineage"], []).append(name)
    return [
        f"step {step}: " + "; ".join(f"{digest[:12]} by {', '.join(names)}" for digest, names in sorted(by.items()))
        for step, by in sorted(digests.items())
        if len(by) > 1
    ]


# -- why ranks have ended ----------------------------------------------------------------------------------------------


def _judge_lines(lines: Iterable[Line], hits: Sequence[Hit], verdict: SiegeVerdict) -> None:
    for line in lines:
        shown = f"{line.source}:{line.number}: {line.text}"
        if _CRASHED.search(line.text):
            verdict.crashes.append(shown)
        elif TRACEBACK in line.text:
            verdict.tracebacks.append(shown)
        elif _ALL_LOST in line.text:
            verdict.repeated.append(shown)
        elif (lost := _declared(line)) is not None and not is_accounted(*lost, line.time, hits):
            verdict.unaccounted.append(shown)
        else:
            continue
        verdict.lines.append(line)


def _declared(line: Line) -> tuple[str, str] | None:
    """Return whose rank was declared lost, as a line of an agent says, and why; None if it says nothing of the kind."""
    if _DISMISSED in line.text:
        return line.source, ""
    found = _DECLARED.search(line.text)
    return None if found is None else (found["host"], found["why"])


def is_accounted(host: str, why: str, time: float, hits: Sequence[Hit]) -> bool:
    """Decide whether a fault explains the loss of a rank: one of its host, or of a host that the reason names.

    A cut has two sides, and either may be the one that goes on.
    """
    recent = [hit for hit in hits if hit.began <= time <= hit.healed + AFTERMATH]
    return any(hit.host == host or hit.what in CUTS or re.search(rf"\b{re.escape(hit.host)}\b", why) for hit in recent)


# -- how long nothing was committed ------------------------------------------------------------------------------------


def quiet_stretches(hits: Sequence[Hit], *, began: float, until: float) -> Iterator[tuple[float, float, int]]:
    """Yield the times, from one to another, in which no fault lasted, and the number of the last fault before."""
    start, fault = began, -1
    for hit in sorted(hits, key=lambda one: one.began):
        if hit.began > start:
            yield start, hit.began, fault
        if hit.healed >= start:
            start, fault = hit.healed, hit.fault
    if until > start:
        yield start, until, fault


def quiet_gaps(logs: Logs, hits: Sequence[Hit], *, until: float) -> list[Gap]:
    """Return the longest time without a new commit of each quiet stretch, from the first commit on.

    Only steps that nobody has committed before count: a job that begins anew makes no progress.
    """
    news, most = list[float](), -1
    for line in logs.commits:
        if line["step"] > most:
            most = line["step"]
            news.append(line["time"])
    if not news:
        return [Gap(0.0, until, -1)]
    gaps = []
    for start, end, fault in quiet_stretches(hits, began=news[0], until=until):
        times = [start, *(time for time in news if start < time < end), end]
        began, ended = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
        gaps.append(Gap(began, ended - began, fault))
    return gaps
