"""A job as lines that fit a terminal of any size: what holds it up first, then the ranks that matter most.  Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncpar.core.observe.waits import find_root
from asyncpar.harmless import harmless_values
from asyncpar.launch.commands.job_text import TITLES, format_rows, headline, row_of
from asyncpar.observe.holdups import describe_holdups, find_trouble, find_waits
from asyncpar.observe.summary import JobSummary, RankReport

HINT: Final = "q: leave"
_FEW_LINES: Final = 12
"""Below this number of lines there is no room for empty lines and the hint."""

_DROPPED_FIRST: Final = ("pid", "host", "for", "what")
"""Columns that are dropped, in this order, until the others fit; sentences name hosts and operations."""

_LEAST_PLACE: Final = 12


@dataclass(frozen=True, slots=True)
class JobScreen:
    """Lines that fit: the title, what holds the job up, a line per rank, and further remarks at the end."""

    is_roomy: bool
    """Whether there is room for empty lines."""
    title: str
    troubles: list[str]
    ranks: list[str]
    notes: list[str]


def fit_job(job: JobSummary, *, columns: int, lines: int, unanswered: str = "") -> JobScreen:
    """Fit ``job`` to a terminal of ``columns`` by ``lines``; ``unanswered`` says why there is no later summary.

    Sentences are folded between words.  Where not all ranks fit, those involved in what holds the job up are shown.
    """
    job = harmless_values(job)
    is_roomy = lines >= _FEW_LINES
    sentences = [*filter(None, [unanswered]), *describe_holdups(job), *job.alarms]
    troubles = _fold(sentences, columns, most=max(1, (lines - 1) // 2))
    room = lines - len(troubles) - (4 if is_roomy else 2)  # the titles of job and columns; an empty line, the hint
    total = len(job.ranks)
    shown = room if total <= room else max(0, room - 1)
    left_out = total - shown
    rows = [row_of(report) for report in _most_important(job, shown)]
    notes = [f"... and {left_out} more ranks"] if left_out > 0 else []
    return JobScreen(
        is_roomy=is_roomy,
        title=_cut(headline(job), columns),
        troubles=troubles,
        ranks=_fit_table(rows, columns) if rows else [],
        notes=[_cut(note, columns) for note in (*notes, *([HINT] if is_roomy else []))],
    )


def _most_important(job: JobSummary, most: int) -> list[RankReport]:
    """Return at most ``most`` reports in the order of ranks: culprits, unhealthy ranks, waiting ranks."""
    reports = job.ranks
    if len(reports) <= most:
        return reports
    waits = find_waits(job)
    culprits = {find_root(rank, waits) for rank in waits}

    def unimportance(report: RankReport) -> tuple[bool, bool, bool, int]:
        return report.rank not in culprits, not find_trouble(report), report.rank not in waits, report.rank

    return sorted(sorted(reports, key=unimportance)[:most], key=lambda report: report.rank)


def _fold(sentences: Sequence[str], columns: int, *, most: int) -> list[str]:
    """Return ``sentences`` in at most ``most`` lines; further lines of a sentence are indented."""
    folded = [line for text in sentences for line in textwrap.wrap(text, columns, subsequent_indent="  ")]
    return folded if len(folded) <= most else [*folded[: most - 1], _cut(folded[most - 1] + " ...", columns)]


def _fit_table(rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Return lines of at most ``columns`` characters, dropping the columns that do not fit."""
    table = [TITLES, *rows]
    dropped = list(_DROPPED_FIRST)
    while dropped and max(map(len, format_rows(table))) > columns:
        if dropped[0] == "what" and columns - _width_without_what(table) >= _LEAST_PLACE:
            break
        column = table[0].index(dropped.pop(0))
        table = [(*row[:column], *row[column + 1 :]) for row in table]
    if dropped and (excess := max(map(len, format_rows(table))) - columns) > 0:
        column = table[0].index("what")
        width = max(len(row[column]) for row in table) - excess
        table = [(*row[:column], _cut(row[column], width), *row[column + 1 :]) for row in table]
    return [_cut(line, columns) for line in format_rows(table)]


def _width_without_what(table: Sequence[Sequence[str]]) -> int:
    column = table[0].index("what")
    return max(map(len, format_rows([(*row[:column], "", *row[column + 1 :]) for row in table])))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."[:width]
