"""Judge a soak of banks: no money is made or lost, no transfer is done twice or forgotten, nothing leaks.  Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scripts.bench.chaos.bank_rank import BANKS, TOTAL
from scripts.bench.chaos.chaos_judge import Logs, judge
from scripts.bench.chaos.siege_judge import MOST_GAP, TRACEBACK, Hit, Line, quiet_gaps, split_steps

UNANSWERED = 60.0
"""Seconds after which a caller that goes on must know what came of its call."""

TOLD = ("WorldChanged", "TimeoutError", "CancelledError")
"""Errors of calls that come of lost ranks, or of the caller itself."""

MOST_MEGABYTES = 24.0
MOST_DESCRIPTORS = 16
APART = 60.0
LEAST_SAMPLES = 12
"""A process with fewer samples has not lived long enough to be judged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process used at a time; ``children`` counts what it has started, zombies too."""

    time: float
    role: str
    pid: int
    megabytes: float
    descriptors: int
    children: int


@dataclass
class BankVerdict:
    """What was wrong, by judge: empty lists if nothing was."""

    totals: list[str] = field(default_factory=list)
    """Money that was made, lost, or seen in the middle of a transfer."""
    twice: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    """Transfers that were answered, or read of, and later have not been done; or others stand in their places."""
    silent: list[str] = field(default_factory=list)
    """Callers that were never notified."""
    errors: list[str] = field(default_factory=list)
    """Calls that have failed with an error that is not the end of the world."""
    steps: list[str] = field(default_factory=list)
    """Steps that were repeated, lost, split or without a sample."""
    gaps: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Ranks that crashed, the exit code, or why the run has not come to its end."""

    @property
    def troubles(self) -> dict[str, list[str]]:
        """All that was wrong, by judge."""
        return {name: found for name, found in vars(self).items() if found}


def judge_bank(
    logs: Logs,
    hits: Sequence[Hit],
    samples: Sequence[Sample],
    lines: Sequence[Line],
    *,
    portions: int,
    until: float,
    most_gap: float = MOST_GAP,
) -> BankVerdict:
    """Judge a run that was watched ``until`` then."""
    verdict = BankVerdict()
    _judge_money(logs, verdict)
    _judge_callers(logs, verdict)
    found = judge(logs, {}, {}, steps=logs.position, portions=portions, is_whole=False)
    verdict.steps += [*found.repeated, *found.samples, *split_steps(logs)]
    for gap in quiet_gaps(logs, hits, until=until):
        if gap.seconds > most_gap:
            verdict.gaps.append(f"no commit for {gap.seconds:.1f} s after fault {gap.fault} had healed")
    verdict.leaks += leaks(samples)
    for line in lines:
        if "exited with code" in line.text or TRACEBACK in line.text or "all members are lost" in line.text:
            verdict.ended.append(f"{line.source}:{line.number}: {line.text}")
    return verdict


# -- money -------------------------------------------------------------------------------------------------------------


def _judge_money(logs: Logs, verdict: BankVerdict) -> None:
    history: dict[str, dict[int, str]] = {}
    """The names of transfers of each bank, by their places."""
    for name, line in logs.of("half"):
        verdict.totals.append(f"{name}: {line['name']} began with {line['total']}, expected {TOTAL}")
    for name, line in logs.of("read"):
        if line["total"] != TOTAL:
            verdict.totals.append(f"{name}: {line['bank']} has {line['total']} after {line['done']} transfers")
        known = history.setdefault(line["bank"], {})
        for place, transfer in enumerate(line["names"], line["done"] - len(line["names"])):
            if known.setdefault(place, transfer) != transfer:
                verdict.forgotten.append(f"{line['bank']}: transfer {place} was {known[place]}, then {transfer}")
    places: dict[str, str] = {}
    for bank, known in history.items():
        missing = [place for place in range(max(known, default=-1)) if place not in known]
        if missing:
            verdict.forgotten.append(f"{bank}: nobody has read transfers {missing[:5]} of {max(known)}")
        for place, transfer in sorted(known.items()):
            if transfer in places:
                verdict.twice.append(f"{transfer}: {places[transfer]}, and {bank} {place}")
            places[transfer] = f"{bank} {place}"
    asked = {line["name"]: line["by"] for _, line in logs.of("asked")}
    last = {line["bank"]: line["time"] for line in sorted((one for _, one in logs.of("read")), key=_time)}
    banks = {line["name"]: line["bank"] for _, line in logs.of("asked")}
    for _, line in logs.of("answered"):
        name = line["name"]
        parts = {name: banks.get(name, "")}
        if asked.get(name) == "by_another":
            parts[f"{name}~"] = BANKS[1]
        read_later = [part for part, bank in parts.items() if line["time"] < last.get(bank, 0.0)]
        verdict.forgotten += [f"{part} was answered, and is not done" for part in read_later if part not in places]


def _time(line: dict[str, float]) -> float:
    return line["time"]


def _judge_callers(logs: Logs, verdict: BankVerdict) -> None:
    for name, lines in logs.lines.items():
        ends = {line["name"] for line in lines if line["kind"] in ("answered", "refused")}
        last = lines[-1]["time"] if lines else 0.0
        for line in lines:
            if line["kind"] == "asked" and line["name"] not in ends and last - line["time"] > UNANSWERED:
                verdict.silent.append(f"{name}: {line['name']} has no answer after {last - line['time']:.0f} s")
            if line["kind"] == "refused" and line["error"] not in TOLD:
                verdict.errors.append(f"{name}: {line['name']}: {line['error']}: {line['text']}")


# -- leaks -------------------------------------------------------------------------------------------------------------


def lives(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of each process that has lived long enough, in order of time.

    Numbers of processes come again: samples that are further apart are those of another one.
    """
    found: dict[tuple[str, int], list[list[Sample]]] = {}
    for sample in sorted(samples, key=lambda one: one.time):
        own = found.setdefault((sample.role, sample.pid), [[]])
        if own[-1] and sample.time - own[-1][-1].time > APART:
            own.append([])
        own[-1].append(sample)
    return [life for own in found.values() for life in own if len(life) >= LEAST_SAMPLES]


def growth(own: Sequence[Sample]) -> tuple[float, float]:
    """Return by how many megabytes, and descriptors, a process grew from the second quarter of its life to the last."""
    quarter = len(own) // 4
    early, late = own[quarter : 2 * quarter], own[-quarter:]
    megabytes = statistics.median(one.megabytes for one in late) - statistics.median(one.megabytes for one in early)
    descriptors = min(one.descriptors for one in late) - min(one.descriptors for one in early)
    return megabytes, descriptors


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Return the processes that use more and more, or whose children are not cleared away."""
    found = []
    for own in lives(samples):
        role, pid = own[0].role, own[0].pid
        megabytes, descriptors = growth(own)
        if megabytes > MOST_MEGABYTES or descriptors > MOST_DESCRIPTORS:
            found.append(f"{role} {pid}: grew by {megabytes:.1f} MB and {descriptors} descriptors")
        children = min(one.children for one in own[-len(own) // 4 :])
        if children > max(2, min(one.children for one in own[: len(own) // 2])):
            found.append(f"{role} {pid}: never fewer than {children} children at the end")
    return found


def largest_growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the largest growth of the processes of each role, and the minutes of the longest life."""
    found: dict[str, dict[str, float]] = {}
    for own in lives(samples):
        megabytes, descriptors = growth(own)
        most = found.setdefault(
            own[0].role, {"megabytes": megabytes, "descriptors": descriptors, "minutes": 0.0, "rss": 0.0}
        )
        most["megabytes"] = round(max(most["megabytes"], megabytes), 1)
        most["descriptors"] = max(most["descriptors"], descriptors)
        most["minutes"] = round(max(most["minutes"], (own[-1].time - own[0].time) / 60), 1)
        most["rss"] = round(max(most["rss"], own[-1].megabytes), 1)
    return found
