"""A job as text for people: a sentence that says what holds it up, and a line per rank.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncpar.observe.alarms import count_missing_rounds
from asyncpar.observe.summary import JobSummary, RankReport

MOST_LINES: Final = 64
_WAITING_SECONDS: Final = 1.0
"""An operation without progress for so long is one that waits."""

_STALE_SECONDS: Final = 3.0
_TITLES: Final = ("rank", "host", "pid", "state", "for", "what", "at")
_RIGHT: Final = frozenset({"rank", "pid", "for"})


def show_job(job: JobSummary, *, width: int | None = None) -> str:
    """Return the text to print; lines are cut to ``width`` characters."""
    rows = [_TITLES, *(row_of(report) for report in job.ranks[:MOST_LINES])]
    missing = count_missing_rounds(job)
    unknown = [f"who is slow is not known yet (steps still to be seen: {missing})"] if missing else []
    lines = [headline(job), *filter(None, [holdup_of(job)]), *job.alarms, *unknown, "", *format_rows(rows)]
    if len(job.ranks) > MOST_LINES:
        lines.append(f"... and {len(job.ranks) - MOST_LINES} more ranks (--json has all)")
    return "".join(line[:width].rstrip() + "\n" for line in lines)


def headline(job: JobSummary) -> str:
    """Return ``job train: running for 12 s, 4 ranks on 1 host``."""
    hosts = len({report.host for report in job.ranks}) or job.nnodes
    ranks = job.world_size or len(job.ranks)
    text = f"job {job.job}: {job.phase or 'running'} for {seconds_text(max(0.0, job.time - job.started))}"
    text += f", {ranks} rank{'s' if ranks != 1 else ''} on {hosts} host{'s' if hosts != 1 else ''}"
    return text + (f", generation {job.generation}" if job.generation else "")


def holdup_of(job: JobSummary) -> str:
    """Return who waits for whom in one sentence; "" if no rank waits for long."""
    reports = {report.rank: report for report in job.ranks}
    waits = {rank: found for rank, report in reports.items() if (found := _awaited(report)) is not None}
    if not waits:
        bad = [f"rank {report.rank} {_condition(report)}" for report in reports.values() if _is_silent(report)]
        return "; ".join(bad[:8])
    ends = {_end_of(rank, waits) for rank in waits}
    if None in ends and len(ends) == 1:
        return f"{_ranks(sorted(waits))} wait for each other"
    culprits = sorted(end for end in ends if end is not None)
    waiting = sorted(rank for rank in waits if _end_of(rank, waits) is not None and rank not in culprits)
    told = "; ".join(f"rank {rank} {_whereabouts(reports.get(rank))}" for rank in culprits[:4])
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{_ranks(waiting)} {verb} for {_ranks(culprits)}: {told}"


def _end_of(rank: int, waits: dict[int, int]) -> int | None:
    """Return the rank at the end of a chain of waits, None for a cycle."""
    seen = set()
    while rank in waits:
        if rank in seen:
            return None
        seen.add(rank)
        rank = waits[rank]
    return rank


def _awaited(report: RankReport) -> int | None:
    summary = report.summary
    if summary is None or _is_silent(report):
        return None
    for operation in summary.operations:
        if operation.is_awaited and operation.seconds + report.age >= _WAITING_SECONDS and operation.waits_for:
            return operation.waits_for[0] if operation.culprit is None else operation.culprit
    return None


def _is_silent(report: RankReport) -> bool:
    return report.condition != "well" or (report.summary is not None and report.summary.blocked is not None)


def _condition(report: RankReport) -> str:
    if report.condition == "ended":
        return report.ending
    if report.condition == "stopped":
        return f"is stopped (SIGSTOP or a debugger), for {seconds_text(report.seconds)}"
    if report.condition == "hung":
        return f"runs no Python code (something holds its interpreter lock), for {seconds_text(report.seconds)}"
    blocked = None if report.summary is None else report.summary.blocked
    return "" if blocked is None else f"blocks its event loop at {blocked.where}, for {seconds_text(blocked.seconds)}"


def _whereabouts(report: RankReport | None) -> str:
    if report is None:
        return "is not known here"
    summary = report.summary
    where = f", last seen at {summary.user_site}" if summary is not None and summary.user_site else ""
    if _is_silent(report):
        return _condition(report) + (where if report.condition in ("stopped", "hung") else "")
    if summary is None:
        return "has told nothing so far"
    if summary.operations:
        return f"is in {summary.operations[0].label}" + (f" ({summary.operations[0].site})" if where else "")
    return f"is in user code at {summary.user_site}" if summary.user_site else "is in no operation"


def row_of(report: RankReport) -> tuple[str, ...]:
    """Return the cells of one rank."""
    summary = report.summary
    what, site = "", "" if summary is None else summary.user_site
    seconds = 0.0 if report.condition == "well" else report.seconds
    state = report.condition if report.condition != "well" else report.phase or "running"
    if summary is not None and summary.longest is not None:
        longest = summary.longest
        what = longest.label + (f" of {longest.group}" if longest.group != "world" else "")
        if longest.waits_for:
            more = ", ..." if len(longest.waits_for) > 3 else ""
            what += f" <- {', '.join(map(str, longest.waits_for[:3]))}{more}"
        site = longest.site or site
        if state == "member":
            state, seconds = ("waiting", longest.seconds) if longest.seconds >= _WAITING_SECONDS else ("running", 0.0)
    elif summary is not None and summary.asks:
        ask = summary.asks[0]
        what = f"{ask.endpoint} of {ask.actor} <- {ask.rank}"
    if summary is not None and summary.blocked is not None and report.condition == "well":
        state, seconds, site = "blocked", summary.blocked.seconds, summary.blocked.where
        what = what or summary.blocked.what
    if report.ending:
        what = report.ending
    state = "running" if state == "member" else state
    if report.condition == "well" and report.age > _STALE_SECONDS:
        state += f" ({seconds_text(report.age)} ago)"
    since = seconds_text(seconds) if seconds > 0.0 else ""
    return (str(report.rank), report.host, str(report.pid), state, since, what, site)


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the cells under each other; the first row has the titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    titles = rows[0]
    return [
        "  ".join(
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        ).rstrip()
        for row in rows
    ]


def seconds_text(seconds: float) -> str:
    """Return ``0.3 s``, ``12 s``, ``3 min 4 s``, ``2 h 5 min``."""
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
