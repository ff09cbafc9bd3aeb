"""Alarms of a job from one summary: a rank that holds up the others and the reason, a slow link.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncpar.observe.rounds import Cause, Round
from asyncpar.observe.stragglers import (
    LEAST_COMMON,
    LinkRate,
    common_rounds,
    find_slow_link,
    find_slow_sender,
    find_straggler,
)
from asyncpar.observe.summary import HostSummary, JobSummary, RankSummary, spell_bytes

INSPECTIONS_BEFORE: Final = 3
"""Number of consecutive inspections with an alarm before it is reported."""

SECONDS_AFTER: Final = 15.0
"""Seconds without an alarm after which it is over."""

SCARCE_SHARE: Final = 0.05
"""Share of its memory that a host has left when it is short of it."""

FILLED_SHARE: Final = 0.75
FILLED_SECONDS: Final = 30.0
"""A host is also short of memory if ``FILLED_SHARE`` is used, and the rest lasts no longer at the recent rate."""

_OVER: Final = {" is slow": "is slow no more", " is short of memory": "has memory again", " does not answer": ""}
"""By the words after the name in an alarm, the words that report its end.

The alarm of an agent may end because its host has left the job: its end is not reported.
"""

_CAUSES = {cause.value: cause for cause in Cause}


def find_alarms(job: JobSummary) -> tuple[str, ...]:
    """Return a sentence for each cause that makes the job slow; empty if it is not slow, or too little is known."""
    summaries = [report.summary for report in job.ranks if report.summary is not None]
    found = [alarm for host in job.hosts if (alarm := _find_shortage(host))]
    straggler = find_straggler({summary.rank: _rounds(summary) for summary in summaries})
    if straggler is not None:
        host = next((summary.host for summary in summaries if summary.rank == straggler.rank), "")
        found.append(straggler.describe(host))
    slow = find_slow_link(
        {
            (min(summary.rank, link.peer), max(summary.rank, link.peer)): link.rtt
            for summary in summaries
            for link in summary.links
            if link.rtt is not None
        }
    )
    if slow is not None:
        found.append(slow.describe())
    busiest = {summary.rank: max(summary.links, key=lambda link: link.bytes) for summary in summaries if summary.links}
    sender = find_slow_sender(
        {rank: LinkRate(link.rate, link.is_full, link.share) for rank, link in busiest.items() if link.rate is not None}
    )
    if sender is not None and (straggler is None or straggler.rank != sender.rank):
        found.append(sender.describe(next((one.host for one in summaries if one.rank == sender.rank), "")))
    return tuple(found)


def _find_shortage(host: HostSummary) -> str:
    """Report a host near a memory limit, where the kernel kills, and the rank that uses most; "" if there is none."""
    memory = host.memory
    if memory is None:
        return ""
    grows = memory.used >= FILLED_SHARE * memory.limit and memory.seconds_left <= FILLED_SECONDS
    if not grows and memory.limit - memory.used >= SCARCE_SHARE * memory.limit:
        return ""
    sizes = {report.rank: report.summary.rss for report in host.ranks if report.summary is not None}
    rank = max(sizes, key=lambda each: sizes[each], default=None)
    most = "" if rank is None else f", most by rank {rank} ({spell_bytes(sizes[rank])})"
    used, limit = spell_bytes(memory.used), spell_bytes(memory.limit)
    soon = f"; at this rate the rest lasts {memory.seconds_left:.0f} s" if grows else ""
    return f"{host.host} is short of memory: {used} of the {limit} of {memory.owner} are used{most}{soon}"


def count_missing_rounds(job: JobSummary) -> int:
    """Return the number of steps still needed to detect a slow rank; 0 if there are enough, or none at all."""
    summaries = [report.summary for report in job.ranks if report.summary is not None]
    if len(summaries) < 2 or len(summaries) < len(job.ranks) or not any(summary.rounds for summary in summaries):
        return 0
    return max(0, LEAST_COMMON - len(common_rounds({summary.rank: _rounds(summary) for summary in summaries})))


class AlarmBoard:
    """Decides when a launcher reports an alarm: once, when it has lasted for a while, and once more when it is over."""

    def __init__(self) -> None:
        self._inspections: dict[tuple[str, str], int] = {}
        """By thing and trouble: the number of consecutive inspections with it."""
        self._reported: dict[tuple[str, str], float] = {}
        """By reported thing and trouble: the time when it was last seen."""

    def add(self, alarms: Iterable[str], now: float) -> list[str]:
        """Add the alarms of one inspection; return the lines to report now."""
        current = {_split(alarm): alarm for alarm in alarms}
        self._inspections = {what: self._inspections.get(what, 0) + 1 for what in current}
        lines = []
        for what, alarm in current.items():
            if what in self._reported:
                self._reported[what] = now
            elif self._inspections[what] >= INSPECTIONS_BEFORE:
                self._reported[what] = now
                lines.append(alarm)
        for what in [what for what, seen in self._reported.items() if now - seen >= SECONDS_AFTER]:
            del self._reported[what]
            name, mark = what
            lines += [f"{name} {_OVER[mark]}"] if _OVER[mark] else []
        return lines


def _split(alarm: str) -> tuple[str, str]:
    """Return the subject of ``alarm``, and the words that follow it."""
    for mark in _OVER:
        name, found, _ = alarm.partition(mark)
        if found:
            return name, mark
    raise ValueError(f"alarm: expected one of {', '.join(_OVER)} in it, got {alarm!r}")


def _rounds(summary: RankSummary) -> list[Round]:
    return [
        Round(
            number=one.number,
            own=one.own * 1e-6,
            seconds=one.micros * 1e-6,
            parts={_CAUSES[name]: micros * 1e-6 for name, micros in one.parts.items() if name in _CAUSES},
            ran=one.ran * 1e-6,
        )
        for one in summary.rounds
    ]
