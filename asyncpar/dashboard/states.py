"""The state of each rank of a job, and one sentence about the cause of a hold-up.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from asyncpar.core.observe.waits import find_root
from asyncpar.observe.holdups import (
    describe_holdups,
    find_trouble,
    find_wait,
    find_waits,
    has_failed,
    is_blocked,
)
from asyncpar.observe.summary import JobSummary, RankReport


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


_UNSUSPICIOUS: Final = (RankActivity.UNKNOWN, RankActivity.COMPUTES, RankActivity.COMMUNICATES)


def find_states(job: JobSummary) -> dict[int, RankActivity]:
    """Return the state of every rank of ``job``."""
    states = {report.rank: _own_state(report) for report in job.ranks}
    waits = find_waits(job)
    for culprit in {find_root(rank, waits) for rank in waits}:
        if culprit is not None and states.get(culprit) in _UNSUSPICIOUS:
            states[culprit] = RankActivity.HOLDS_UP
    return states


def _own_state(report: RankReport) -> RankActivity:
    summary = report.summary
    if report.condition == "ended":
        return RankActivity.FAILED if has_failed(report) else RankActivity.ENDED
    if report.condition != "well":
        return RankActivity.STOPPED if report.condition == "stopped" else RankActivity.BLOCKED
    if summary is None:
        return RankActivity.UNKNOWN
    if find_trouble(report):
        return RankActivity.BLOCKED if is_blocked(report) else RankActivity.SILENT
    if find_wait(report) is not None:
        return RankActivity.WAITS
    communicates = summary.longest is not None and summary.longest.is_awaited
    return RankActivity.COMMUNICATES if communicates else RankActivity.COMPUTES


def describe_job(job: JobSummary, states: Mapping[int, RankActivity]) -> str:
    """Describe in one sentence what holds ``job`` up, or that nothing does."""
    if not states:
        return "No rank has started yet."
    holdups = describe_holdups(job)
    return (
        f"{holdups[0]}."
        if holdups
        else _describe_without_waiting(states, is_slow=any(" is slow" in alarm for alarm in job.alarms))
    )


def _describe_without_waiting(states: Mapping[int, RankActivity], *, is_slow: bool) -> str:
    total, ended = len(states), len(_having(states, RankActivity.ENDED))
    unknown = _having(states, RankActivity.UNKNOWN)
    if ended == total:
        return f"All {total} ranks have ended." if total > 1 else "The rank has ended."
    if len(unknown) == total - ended:
        return "The ranks have started; none has joined a world yet."
    running = total - ended - len(unknown)
    text = f"All {total} ranks run" if running == total > 1 else f"{running} of {total} ranks run"
    rest = [f"{ended} have ended" if ended else "", f"{len(unknown)} have reported nothing yet" if unknown else ""]
    how = ", slower than they could." if is_slow else "; nothing holds them up."  # alarms have the reason
    return ", ".join(filter(None, [text, *rest])) + how


def _having(states: Mapping[int, RankActivity], wanted: RankActivity) -> list[int]:
    return sorted(rank for rank, state in states.items() if state is wanted)
