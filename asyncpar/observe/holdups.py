"""Waits and failures of ranks, found in the summaries of a job, and the sentences of launchers about them.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from asyncpar.core.observe.waits import CONDITION_WORDS, WaitNotice, name_ranks, spell_seconds, sum_up
from asyncpar.observe.summary import AskSummary, JobSummary, OperationSummary, RankReport

WAITING_SECONDS: Final = 1.0
"""An operation without progress for this many seconds counts as waiting."""

ASKING_SECONDS: Final = 10.0
"""A call of an actor without an answer for this many seconds counts as waiting, as does one that its rank has
reported."""

BLOCKED_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 5.0
"""A rank that has reported nothing for this many seconds is silent: its last report no longer counts."""


def describe_holdups(job: JobSummary) -> list[str]:
    """Return a sentence for each failure, and one for each awaited rank, the most awaited first.

    If no rank waits for long, there is one for each rank that is not well; none if nothing holds the job up.  All
    reports of hold-ups use these sentences: commands, the page and the report.
    """
    failures = describe_failures(job)
    if waits := find_waits(job):
        return [*failures, *sum_up(waits)]
    troubles = ((report, find_trouble(report)) for report in job.ranks if not has_failed(report))
    reported = [f"{name_rank(report)} {trouble}" for report, trouble in troubles if trouble]
    return [*failures, *(text for text in reported if not any(each.startswith(text) for each in failures))]


def describe_failures(job: JobSummary) -> list[str]:
    """Return a sentence for each rank that has failed by itself, the first to fail first.

    Those that name another rank as their cause are counted in its sentence, even if that one has not failed: it is
    stopped, or did not do its part.
    """
    reports = {report.rank: report for report in job.ranks}
    failed = {rank: report for rank, report in reports.items() if has_failed(report)}
    odd = find_odd_calls({rank: report.call for rank, report in failed.items() if report.call})
    victims: dict[int, list[int]] = {}
    for rank in failed:
        cause = follow_blames(rank, {each: failed[each].blames for each in failed})
        if odd and failed[rank].call and rank not in odd:
            cause = odd[0]
        victims.setdefault(cause, [])
        if cause != rank:
            victims[cause].append(rank)

    def failed_for(cause: int) -> float:
        return max(failed[rank].seconds for rank in (cause, *victims[cause]) if rank in failed)

    sentences = []
    for cause in sorted(victims, key=lambda cause: (-failed_for(cause), cause)):
        known = reports.get(cause)
        text = f"rank {cause} is not known here" if known is None else f"{name_rank(known)} {describe_rank(known)}"
        if others := victims[cause]:
            text += f"; {name_ranks(others)} {'has' if len(others) == 1 else 'have'} failed because of that"
        sentences.append(text)
    return sentences


def follow_blames(rank: int, blames: Mapping[int, int | None]) -> int:
    """Return the rank at the end of the chain of blames from ``rank``; the lowest one of a cycle.

    ``blames`` are the ranks that failed ones name as their cause.
    """
    path = [rank]
    while (blamed := blames.get(path[-1])) is not None:
        if blamed in path:
            return min(path[path.index(blamed) :])
        path.append(blamed)
    return path[-1]


def find_odd_calls(calls: Mapping[int, str]) -> list[int]:
    """Return the ranks whose call differs from that of the majority; in a tie, from that of the lowest rank.

    Empty if all made the same call.
    """
    counts = Counter(calls.values())
    if len(counts) < 2:
        return []
    usual = max(counts, key=lambda call: (counts[call], -min(rank for rank in calls if calls[rank] == call)))
    return sorted(rank for rank, call in calls.items() if call != usual)


def find_waits(job: JobSummary) -> dict[int, WaitNotice]:
    """Return, by rank, the waits of ranks that have waited for another rank for long."""
    reports = {report.rank: report for report in job.ranks}
    notices = {}
    for rank, report in reports.items():
        match find_wait(report):
            case AskSummary() as ask:
                notices[rank] = _of_ask(ask, report.age, reports)
            case OperationSummary() as operation if (awaited := find_awaited_rank(operation)) is not None:
                notices[rank] = _of_operation(operation, report.age, awaited, reports.get(awaited))
    return notices


def _of_operation(operation: OperationSummary, age: float, awaited: int, culprit: RankReport | None) -> WaitNotice:
    return WaitNotice(
        operation=operation.label if operation.group == "world" else f"{operation.label} of group {operation.group}",
        seconds=operation.seconds + age,
        site=operation.site,
        culprit=awaited,
        host="" if culprit is None else culprit.host,
        where="is not known here" if culprit is None else describe_rank(culprit),
    )


def _of_ask(ask: AskSummary, age: float, reports: Mapping[int, RankReport]) -> WaitNotice:
    """Return the report of ``ask`` by the caller's rank, updated with the known state of the rank at its end."""
    notice = ask.told or WaitNotice(
        operation=f"{ask.endpoint}() of actor {ask.actor!r}", seconds=0.0, culprit=ask.rank, actor=ask.actor
    )
    culprit = None if notice.culprit is None else reports.get(notice.culprit)
    return msgspec.structs.replace(
        notice,
        seconds=ask.seconds + age,
        site=ask.site,
        host=notice.host if culprit is None else culprit.host,
        where=notice.where if culprit is None or not find_trouble(culprit) else describe_rank(culprit),
    )


def find_wait(report: RankReport) -> OperationSummary | AskSummary | None:
    """Return the operation in which the rank waits for another one, else the call of an actor, else any operation.

    None if it waits in none, or if its report no longer counts.
    """
    summary, age = report.summary, report.age
    if summary is None or find_trouble(report) or report.condition == "ended":
        return None
    awaited = (operation for operation in summary.operations if operation.is_awaited)
    waiting = [operation for operation in awaited if operation.seconds + age >= WAITING_SECONDS]
    certain = (operation for operation in waiting if find_awaited_rank(operation) is not None)
    asks = (ask for ask in summary.asks if is_waiting(ask, age))
    return next(certain, None) or next(asks, None) or next(iter(waiting), None)


def is_waiting(ask: AskSummary, age: float) -> bool:
    """Return whether the call has waited for long, by its rank's report of ``age`` seconds ago."""
    return ask.told is not None or (not ask.is_stream and ask.seconds + age >= ASKING_SECONDS)


def find_awaited_rank(operation: OperationSummary) -> int | None:
    """Return the rank that holds ``operation`` up as far as it knows; None if it waits for no rank in particular."""
    if operation.culprit is not None:
        return operation.culprit
    return operation.waits_for[0] if operation.waits_for else None


def has_failed(report: RankReport) -> bool:
    """Return whether the rank has ended otherwise than by itself with code 0."""
    return report.condition == "ended" and report.ending not in ("", "exited with code 0")


def is_blocked(report: RankReport) -> bool:
    """Return whether code has blocked the event loop of the rank for long."""
    blocked = None if report.summary is None else report.summary.blocked
    return blocked is not None and blocked.seconds >= BLOCKED_SECONDS


def find_trouble(report: RankReport) -> str:
    """Describe the state of a rank that cannot take part in anything now; "" if it can."""
    summary = report.summary
    match report.condition:
        case "ended":
            return report.ending if has_failed(report) else ""
        case condition if words := CONDITION_WORDS.get(condition):
            return f"{words}, for {spell_seconds(report.seconds)}"
    if summary is None:
        return ""
    if (blocked := summary.blocked) is not None and is_blocked(report):
        what = f" in {blocked.what}" if blocked.what and not report.place else ""
        where = report.place or blocked.where
        return f"blocks its event loop{what} at {where}, for {spell_seconds(blocked.seconds + report.age)}"
    return f"has reported nothing for {spell_seconds(report.age)}" if report.age >= SILENT_SECONDS else ""


def describe_rank(report: RankReport) -> str:
    """Describe the current work of a rank that others wait for: ``is in user code at train.py:57``."""
    summary = report.summary
    site = "" if summary is None else summary.user_site
    if trouble := find_trouble(report):
        if report.place and f" at {report.place}," not in trouble:
            return f"{trouble}, at {report.place}"
        return f"{trouble}, last seen at {site}" if site and CONDITION_WORDS.get(report.condition) else trouble
    if report.condition == "ended":
        return report.ending or "has ended"
    if summary is None:
        return "has reported nothing so far"
    if (operation := next((each for each in summary.operations if each.is_awaited), None)) is not None:
        return f"is in {operation.label}" + (f" at {operation.site}" if operation.site else "")
    return summary.doing or (f"is in user code at {site}" if site else "is in no operation")


def name_rank(report: RankReport) -> str:
    """Format the name of a rank: ``rank 2 (host-b)``."""
    return f"rank {report.rank} ({report.host})" if report.host else f"rank {report.rank}"
