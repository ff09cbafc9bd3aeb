"""Summarize what ranks wait for, and decide when the launcher reports it.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec

from asyncpar.core.observe.waits import JOINING, WaitNotice, find_root, name_ranks, spell_ranks, sum_up

COALESCE_SECONDS: Final = 0.5
"""Seconds that news wait for those of other ranks."""


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A rank waits (``notice``; None: no longer), and code at ``blocked`` blocks its loop ("": none does).

    ``has_failed``: it does not go on, because what it waited for has failed.
    """

    generation: int
    rank: int
    notice: WaitNotice | None = None
    blocked: str = ""
    has_failed: bool = False


def name_missing(report: WaitReport, missing: Iterable[int], host_of: Callable[[int], str]) -> WaitReport:
    """Return ``report`` with the rank for which the world waits, if the reporting rank waits for the world.

    ``missing`` are the ranks that have not joined it.
    """
    absent = sorted(missing)
    is_joining = report.notice is not None and report.notice.operation.startswith(JOINING)
    if report.notice is None or not is_joining or not absent or report.rank in absent:
        return report
    others = f" (nor {'have' if absent[2:] else 'has'} {spell_ranks(absent[1:])})" if absent[1:] else ""
    where = f"has not called init() so far{others}"
    notice = msgspec.structs.replace(report.notice, culprit=absent[0], host=host_of(absent[0]), where=where)
    return replace(report, notice=notice)


class _ReportedWait(NamedTuple):
    """A reported wait of ``ranks``, in order; ``how`` their culprit was stopped or blocked then, "" if not."""

    ranks: list[int]
    how: str


class WaitBoard:
    """The waits of the ranks of one generation.

    A wait is reported once, again if its culprit turns out to be stopped or blocked only later, and when it is over.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, WaitNotice] = {}
        self._blocked: dict[int, str] = {}
        self._conditions: dict[int, str] = {}
        self._reported: dict[int | None, _ReportedWait] = {}
        """By culprit."""
        self._cycles: set[str] = set()
        """Deadlocks that were reported."""
        self._has_failed = False
        """Whether operations have failed; then ranks that no longer wait are not reported, since errors report them."""
        self._due: float | None = None

    @property
    def next_deadline(self) -> float | None:
        """When the next report is due, None if there is nothing to report."""
        return self._due

    def clear(self) -> None:
        """Forget everything, before a new generation."""
        for table in (self._waiting, self._blocked, self._conditions, self._reported):
            table.clear()
        self._cycles.clear()
        self._due = None

    def take(self, report: WaitReport, now: float) -> None:
        """Record the report of a rank."""
        if report.notice is None:
            before = self._waiting.pop(report.rank, None)
            self._has_failed |= report.has_failed and before is not None
        else:
            self._waiting[report.rank] = report.notice
        if report.blocked:
            self._blocked[report.rank] = f"blocks its event loop at {report.blocked}"
        else:
            self._blocked.pop(report.rank, None)
        self._change(now)

    def set_condition(self, rank: int, how: str, now: float) -> None:
        """Record an agent's report about a rank (``is stopped``); "": it runs."""
        if how:
            self._conditions[rank] = how
        else:
            self._conditions.pop(rank, None)
        self._change(now)

    def condition(self, rank: int) -> str:
        """Return the condition that the rank cannot report itself, "" if there is none."""
        return self._conditions.get(rank) or self._blocked.get(rank, "")

    def forget(self, rank: int, now: float) -> None:
        """Forget a rank that has ended."""
        self._has_failed |= rank in self._waiting
        for table in (self._waiting, self._blocked, self._conditions):
            table.pop(rank, None)
        self._change(now)

    def report(self, now: float) -> list[str]:
        """Return the reports that are due now."""
        if self._due is None or now < self._due:
            return []
        self._due = None
        notices = {
            rank: self._explained(notice) for rank, notice in self._waiting.items() if not self.condition(rank)
        }  # waits of others end at a rank that is stopped or blocked, whatever it reported before
        by_culprit: dict[int | None, dict[int, WaitNotice]] = {}
        for rank, notice in notices.items():
            by_culprit.setdefault(find_root(rank, notices), {})[rank] = notice
        lines = []
        for culprit in [culprit for culprit in self._reported if culprit not in by_culprit]:
            gone_on = [
                rank
                for rank in self._reported.pop(culprit).ranks
                if rank not in self._waiting and not self.condition(rank)
            ]
            if gone_on and not self._has_failed:
                lines.append(f"{name_ranks(gone_on)} {'goes' if len(gone_on) == 1 else 'go'} on")
        self._has_failed = False
        for culprit, waiting in by_culprit.items():
            how = "" if culprit is None else self.condition(culprit)
            reported = self._reported.get(culprit)
            if reported is None or (how and not reported.how):
                self._reported[culprit] = _ReportedWait(sorted(waiting), how)
                lines += [line for line in sum_up(notices, only=waiting) if line not in self._cycles]
                self._cycles |= {notice.cycle for notice in waiting.values() if notice.cycle}
        return lines

    def _explained(self, notice: WaitNotice) -> WaitNotice:
        """Return ``notice`` with the known condition of its culprit."""
        how = "" if notice.culprit is None else self.condition(notice.culprit)
        return msgspec.structs.replace(notice, where=how) if how else notice

    def _change(self, now: float) -> None:
        if self._due is None and (self._waiting or self._reported):
            self._due = now + COALESCE_SECONDS
