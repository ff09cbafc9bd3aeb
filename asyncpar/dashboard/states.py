"""Decide what each rank of a job is doing, and say in one sentence what holds the job up.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final

from asyncpar.observe.summary import JobSummary, RankReport

WAITING_SECONDS: Final = 1.0
"""An operation without progress for this long is shown as waiting."""

BLOCKED_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 5.0
"""A rank that has told nothing for this long is shown as silent."""

_MOST_NAMED = 6


class RankActivity(IntEnum):
    """What a rank does, in the order of severity; the page has a colour for each."""

    UNKNOWN = 0
    ENDED = 1
    COMPUTES = 2
    COMMUNICATES = 3
    WAITS = 4
    SILENT = 5
    HOLDS_UP = 6
    BLOCKED = 7
    STOPPED = 8
    FAILED = 9


def find_states(job: JobSummary) -> dict[int, RankActivity]:
    """Return the state of every rank of ``job``."""
    reports = {report.rank: report for report in job.ranks}
    states = {rank: _own_state(report) for rank, report in reports.items()}
    for culprit in find_culprits(reports, states):
        if states.get(culprit) in (RankActivity.UNKNOWN, RankActivity.COMPUTES, RankActivity.COMMUNICATES):
            states[culprit] = RankActivity.HOLDS_UP
    return states


def find_culprits(reports: Mapping[int, RankReport], states: Mapping[int, RankActivity]) -> Counter[int]:
    """Return the ranks at the end of chains of waiting, and how many ranks wait for each."""
    culprits: Counter[int] = Counter()
    for rank, state in states.items():
        if state is not RankActivity.WAITS:
            continue
        chain = [rank]
        while states.get(chain[-1]) is RankActivity.WAITS and (awaited := _awaited(reports[chain[-1]])) is not None:
            if awaited in chain:  # a circle: its lowest rank stands for it
                chain.append(min(chain[chain.index(awaited) :]))
                break
            chain.append(awaited)
        if len(chain) > 1:
            culprits[chain[-1]] += 1
    return culprits


def _own_state(report: RankReport) -> RankActivity:
    summary = report.summary
    if report.condition == "ended":
        return RankActivity.FAILED if report.ending and report.ending != "exited with code 0" else RankActivity.ENDED
    if report.condition != "well":
        return RankActivity.STOPPED
    if summary is None:
        return RankActivity.UNKNOWN
    if summary.blocked is not None and summary.blocked.seconds >= BLOCKED_SECONDS:
        return RankActivity.BLOCKED
    if report.age >= SILENT_SECONDS:
        return RankActivity.SILENT
    operation = summary.longest
    if operation is None or not operation.is_awaited:
        return RankActivity.COMPUTES
    return RankActivity.WAITS if operation.seconds >= WAITING_SECONDS else RankActivity.COMMUNICATES


def _awaited(report: RankReport) -> int | None:
    """Return the rank that ``report``'s rank waits for."""
    operation = None if report.summary is None else report.summary.longest
    if operation is None:
        return None
    if operation.culprit is not None:
        return operation.culprit
    return operation.waits_for[0] if operation.waits_for else None


def describe_job(job: JobSummary, states: Mapping[int, RankActivity]) -> str:
    """Return one sentence: what holds ``job`` up, or that nothing does."""
    reports = {report.rank: report for report in job.ranks}
    if not reports:
        return "No rank has started yet."
    if failed := _having(states, RankActivity.FAILED):
        report = reports[failed[0]]
        return f"{_place(report)} {report.ending}{_and_others(failed)}."
    culprits = find_culprits(reports, states)
    if not culprits:
        return _describe_without_waiting(reports, states)
    culprit = max(culprits, key=lambda rank: (culprits[rank], -rank))
    waiting = [rank for rank in _having(states, RankActivity.WAITS) if rank != culprit]
    if states.get(culprit) is RankActivity.WAITS:
        return f"{_ranks(sorted({culprit, *waiting}))} wait for each other{_in_operation(reports[culprit])}."
    verb = "waits" if len(waiting) == 1 else "wait"
    who = f"{_ranks(waiting)} {verb} for {_place(reports.get(culprit), culprit)}{_in_operation(reports[waiting[0]])}"
    return f"{who}; rank {culprit} {_doing(reports.get(culprit), states.get(culprit, RankActivity.UNKNOWN))}."


def _describe_without_waiting(reports: Mapping[int, RankReport], states: Mapping[int, RankActivity]) -> str:
    for state in (RankActivity.STOPPED, RankActivity.BLOCKED, RankActivity.SILENT):
        if ranks := _having(states, state):
            report = reports[ranks[0]]
            return f"{_place(report)} {_doing(report, state)}{_and_others(ranks)}."
    total, ended = len(reports), len(_having(states, RankActivity.ENDED))
    unknown = _having(states, RankActivity.UNKNOWN)
    if ended == total:
        return f"All {total} ranks have ended." if total > 1 else "The rank has ended."
    if len(unknown) == total - ended:
        return "The ranks have started; none has joined a world yet."
    running = total - ended - len(unknown)
    text = f"All {total} ranks run" if running == total > 1 else f"{running} of {total} ranks run"
    rest = [f"{ended} have ended" if ended else "", f"{len(unknown)} have told nothing yet" if unknown else ""]
    return ", ".join(filter(None, [text, *rest])) + "; nothing holds them up."


def _doing(report: RankReport | None, state: RankActivity) -> str:
    if report is None:
        return "is gone"
    summary = report.summary
    if state is RankActivity.STOPPED:
        what = "is stopped" if report.condition == "stopped" else "runs no Python code: something holds its GIL"
        return f"{what} ({_duration(report.seconds)})"
    if state is RankActivity.FAILED or state is RankActivity.ENDED:
        return report.ending or "has ended"
    if summary is not None and state is RankActivity.BLOCKED and summary.blocked is not None:
        blocked = summary.blocked
        return f"blocks its event loop in {blocked.what} at {blocked.where} ({_duration(blocked.seconds)})"
    if state is RankActivity.SILENT:
        return f"has told nothing for {_duration(report.age)}"
    if summary is not None and summary.user_site:
        return f"is at {summary.user_site}"
    return "has not called it"


def _in_operation(report: RankReport) -> str:
    operation = None if report.summary is None else report.summary.longest
    return "" if operation is None else f" in {operation.label} ({_duration(operation.seconds)})"


def _place(report: RankReport | None, rank: int = 0) -> str:
    if report is None:
        return f"rank {rank}"
    return f"rank {report.rank} ({report.host})" if report.host else f"rank {report.rank}"


def _having(states: Mapping[int, RankActivity], wanted: RankActivity) -> list[int]:
    return sorted(rank for rank, state in states.items() if state is wanted)


def _and_others(ranks: Sequence[int]) -> str:
    return f", and {len(ranks) - 1} more" if len(ranks) > 1 else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``ranks 0, 1 and 3``, or how many they are."""
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_join(ranks)}"


def _join(ranks: Iterable[int]) -> str:
    *first, last = map(str, ranks)
    return f"{', '.join(first)} and {last}"


def _duration(seconds: float) -> str:
    if seconds < 60.0:
        return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
