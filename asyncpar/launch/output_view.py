"""Output of ranks for the page: the last lines of all hosts, and all that is kept of a few ranks.

Launchers and agents keep the last output of their own ranks.  Output of ranks on the host of the page arrives as it is
printed; the others are asked for the end of theirs while a page is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncpar.dashboard.log_tail import LONGEST_LINE, MOST_LINES, LogTail
from asyncpar.dashboard.states import find_states
from asyncpar.launch.host_watch import NOTHING
from asyncpar.launch.rank_output import OutputTail
from asyncpar.observe.summary import JobSummary, RankAnswer, RankReport, unpack

if TYPE_CHECKING:
    from asyncpar.launch.job_view import JobWatch

MOST_FOLLOWED: Final = 64
"""Ranks of other hosts that are asked at one time, those in the worst states first."""

_MOST_KNOWN: Final = 4 * MOST_FOLLOWED


class OutputFollower:
    """Adds to ``tail`` the output of ranks that are not in ``own()``, those of this host."""

    def __init__(self, view: JobWatch, tail: LogTail, own: Callable[[], Sequence[RankReport]]) -> None:
        self._view = view
        self._tail = tail
        self._own = own
        self._ends: dict[tuple[str, int], int] = {}
        """By host and process: the number of bytes it had printed at the last inspection."""

    async def look(self, job: JobSummary) -> None:
        """Ask the ranks of other hosts once."""
        ranks = self._choose(job)
        if not ranks:
            return
        for answer in await self._view.collect("tail", ranks):
            with suppress(msgspec.DecodeError):  # it has nothing to report
                self._take(answer, unpack(answer.content, OutputTail), most=MOST_LINES // 2 // len(ranks))
        while len(self._ends) > _MOST_KNOWN:
            del self._ends[next(iter(self._ends))]

    def _choose(self, job: JobSummary) -> list[int]:
        own = {report.rank for report in self._own()}
        states = find_states(job)
        others = [report.rank for report in job.ranks if report.rank not in own]
        return sorted(sorted(others, key=lambda rank: (-states[rank], rank))[:MOST_FOLLOWED])

    def _take(self, answer: RankAnswer, tail: OutputTail, *, most: int) -> None:
        """Pass on new output: at first the last lines (``most``), then everything, as far as it is kept."""
        rank, known = answer.rank, self._ends.pop((answer.host, tail.pid), None)
        self._ends[answer.host, tail.pid] = tail.end
        fresh = tail.end - (known or 0)
        content = tail.content[-fresh:] if fresh else b""
        if fresh > len(tail.content):  # begins in the middle of a line
            content = content.partition(b"\n")[2]
            if known is not None:
                self._tail.feed(b" ...\n", rank=rank)
        if known is None:
            *lines, rest = content.split(b"\n")
            content = b"\n".join([*lines[-most:], rest])
        if content:
            self._tail.feed(content, rank=rank)


async def read_output(view: JobWatch, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the last lines of each of ``ranks``, at least one of each and at most 1000 in all, as plain values."""
    answers = await view.collect("output", ranks)
    missing = sorted(set(ranks) - {answer.rank for answer in answers})
    lines = [line for answer in answers for line in _lines(answer, MOST_LINES // len(ranks))]
    return lines + [{"rank": rank, "text": "(the job has no such rank)", "error": True} for rank in missing]


def _lines(answer: RankAnswer, most: int) -> list[dict[str, Any]]:
    """Return the last lines of a rank; a single one with the reason if there are none."""
    lines = answer.content.decode("utf-8", "replace").split("\n")
    texts = [line.rstrip("\r").rpartition("\r")[2][:LONGEST_LINE] for line in lines[: -1 if not lines[-1] else None]]
    if not texts:
        why = answer.error if answer.error not in ("", NOTHING) else "nothing was printed"
        return [{"rank": answer.rank, "text": f"({why})", "error": True}]
    return [{"rank": answer.rank, "text": text, "error": False} for text in texts[-most:]]
