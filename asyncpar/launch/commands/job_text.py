"""A job as text: a sentence that says what holds it up, and a line per rank.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncpar.core.observe.waits import spell_seconds
from asyncpar.harmless import harmless_values
from asyncpar.observe.alarms import count_missing_rounds
from asyncpar.observe.holdups import WAITING_SECONDS, describe_holdups, is_waiting
from asyncpar.observe.summary import JobSummary, RankReport

MOST_LINES: Final = 64
MOST_HOLDUPS: Final = 8
MOST_RESTARTS: Final = 4
TITLES: Final = ("rank", "host", "pid", "state", "for", "what", "at")
_RIGHT: Final = frozenset({"rank", "pid", "for"})


def show_job(job: JobSummary, *, width: int | None = None) -> str:
    """Return the text to print; lines are cut to ``width`` characters."""
    job = harmless_values(job)
    rows = [TITLES, *(row_of(report) for report in job.ranks[:MOST_LINES])]
    missing = count_missing_rounds(job)
    holdups = _bounded(describe_holdups(job))
    unknown = [f"who is slow is not known yet (steps still to be seen: {missing})"] if missing and not holdups else []
    troubles = [*holdups, *job.alarms, *unknown]
    lines = [headline(job), *troubles, *describe_past(job), "", *format_rows(rows)]
    if len(job.ranks) > MOST_LINES:
        lines.append(f"... and {len(job.ranks) - MOST_LINES} more ranks (--json has all)")
    return "".join(line[:width].rstrip() + "\n" for line in lines)


def name_dashboard(job: JobSummary, *, is_whole: bool = True, is_agent: bool = False) -> str:
    """Return the location of the job's dashboard, or how to get one.

    ``is_whole``: the launcher that was asked sees all hosts; ``is_agent``: an agent was asked.
    """
    if job.dashboard:
        return f"dashboard: {job.dashboard}"
    if is_agent:
        return (
            "no dashboard here (`asyncpar agent --dashboard` has one, and the launcher of a job with --dashboard; "
            "`asyncpar top` shows the job here)"
        )
    if not is_whole:
        return "no dashboard here (`asyncpar status` on the first host says where that of the whole job is)"
    return "no dashboard (`asyncpar launch --dashboard` has one; `asyncpar top` shows the job here)"


def headline(job: JobSummary) -> str:
    """Return ``job train: running for 12 s, 4 ranks on 1 host``."""
    hosts = len({report.host for report in job.ranks}) or job.nnodes
    ranks = job.world_size or len(job.ranks)
    text = f"job {job.job}: {job.phase or 'running'} for {spell_seconds(max(0.0, job.time - job.started))}"
    text += f", {ranks} rank{'s' if ranks != 1 else ''} on {hosts} host{'s' if hosts != 1 else ''}"
    text += f", generation {job.generation}" if job.generation else ""
    return text + (f", {job.restarts} restart{'s' if job.restarts != 1 else ''}" if job.restarts else "")


def describe_past(job: JobSummary) -> list[str]:
    """Return the reasons of the last restarts, the newest first."""
    shown = job.past[: -MOST_RESTARTS - 1 : -1]
    lines = [f"began again {spell_seconds(max(0.0, job.time - past.time))} ago: {past.reason}" for past in shown]
    return [*lines, f"... and {more} times before that"] if (more := len(job.past) - len(shown)) else lines


def _bounded(sentences: Sequence[str]) -> list[str]:
    more = len(sentences) - MOST_HOLDUPS
    return [*sentences[:MOST_HOLDUPS], f"... and {more} more"] if more > 0 else list(sentences)


def row_of(report: RankReport) -> tuple[str, ...]:
    """Return the table cells of one rank."""
    summary = report.summary
    what, site = "", report.place or ("" if summary is None else summary.user_site)
    seconds = 0.0 if report.condition == "well" else report.seconds
    state = report.condition if report.condition != "well" else report.phase or "running"
    if summary is not None and summary.longest is not None:
        longest = summary.longest
        what = longest.label + (f" of {longest.group}" if longest.group != "world" else "")
        if longest.waits_for:
            more = ", ..." if len(longest.waits_for) > 3 else ""
            what += f" <- {', '.join(map(str, longest.waits_for[:3]))}{more}"
        site = report.place or longest.site or site
        if state == "member":
            state, seconds = ("waiting", longest.seconds) if longest.seconds >= WAITING_SECONDS else ("running", 0.0)
    elif summary is not None and summary.asks:
        ask = summary.asks[0]
        what = f"{ask.endpoint} of {ask.actor} <- {ask.rank}"
        site = report.place or ask.site or site
        if state == "member" and is_waiting(ask, report.age):
            state, seconds = "waiting", ask.seconds
    if summary is not None and summary.blocked is not None and report.condition == "well":
        state, seconds = "blocked", summary.blocked.seconds + report.age
        site = report.place or summary.blocked.where
        what = what or (summary.blocked.what if site == summary.blocked.where else "")
    if report.ending:
        what = report.ending
    if not what and site:
        doing = report.doing if report.place or summary is None else summary.doing
        what = doing.removesuffix(f" at {site}")
    state = "running" if state == "member" else state
    if summary is not None and report.is_stale and report.condition != "ended":
        state += f" (reported {spell_seconds(report.age)} ago)"
    since = spell_seconds(seconds) if seconds > 0.0 else ""
    return (str(report.rank), report.host, str(report.pid), state, since, what, site)


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of ``rows`` in columns; the first row has the titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    titles = rows[0]
    return [
        "  ".join(
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        ).rstrip()
        for row in rows
    ]
