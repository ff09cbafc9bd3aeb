"""`asyncpar top`: the status of a job, refreshed in place until it ends or the user presses q or Ctrl-C.

The lines fit a terminal of any size: what holds the job up first, then the ranks that matter most.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from asyncpar.errors import LaunchError, UsageError
from asyncpar.harmless import harmless_line
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result
from asyncpar.launch.commands.job_choice import ask_job, job_argument
from asyncpar.launch.job_directory import find_job
from asyncpar.launch.options import parse_seconds
from asyncpar.observe.summary import JobSummary

if TYPE_CHECKING:
    from rich.text import Text
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncpar.core.observe.waits import find_root
from asyncpar.harmless import harmless_values
from asyncpar.launch.commands.job_text import TITLES, format_rows, headline, row_of
from asyncpar.observe.holdups import describe_holdups, find_trouble, find_waits
from asyncpar.observe.summary import RankReport

_RESIZE_SECONDS = 0.2
"""Seconds between checks of the terminal's size."""

_LEAVING_KEYS = frozenset("qQ\x04")
"""q and Ctrl-D."""


HINT: Final = "q: leave"
_FEW_LINES: Final = 12
"""Below this number of lines there is no room for empty lines and the hint."""

_DROPPED_FIRST: Final = ("pid", "host", "for", "what")
"""Columns that are dropped, in this order, until the others fit; sentences name hosts and operations."""

_LEAST_PLACE: Final = 12


@click.command(cls=OneLineCommand)
@option("--every", metavar="SECONDS", default="1", help="How often to look.  [1]")
@job_argument
def top(job: str | None, every: str, *, as_json: bool) -> None:
    """Show what each rank does, again and again, until the job ends.

    JOB is the name of a job that runs on this host; it is needed only if there
    are several.  In a terminal the picture stays in place, and fits it: ranks
    that hold the job up come first; q or Ctrl-C leaves.  Elsewhere one picture
    follows the other.  Exits with code 1 if no job answers.
    """
    exit_with("top", lambda: _top(job, every, as_json=as_json))


def _top(job: str | None, every: str, *, as_json: bool) -> int:
    seconds = parse_seconds("--every", every)
    if not seconds > 0.0:
        raise UsageError(f"--every: expected more than 0 seconds, got {every}")
    views = _follow(job)
    with suppress(KeyboardInterrupt):  # the way to leave it
        if as_json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print_all(views, seconds, as_json=as_json)
        else:
            _show_in_place(views, seconds)
    return 0


def _print_all(views: Iterator[tuple[JobSummary, str]], seconds: float, *, as_json: bool) -> None:
    from asyncpar.launch.commands.job_text import show_job
    from asyncpar.observe.summary import to_json

    for summary, unanswered in views:
        if not unanswered:
            print_result("the job", to_json(summary) + b"\n" if as_json else show_job(summary) + "\n")
        time.sleep(seconds)


def _follow(job: str | None) -> Iterator[tuple[JobSummary, str]]:
    """Yield the state of the job on each request, until it has ended.  Raises ``LaunchError`` if it never was there.

    While its launcher does not answer, the last answer is yielded with the reason why there is no later one.
    """
    entry, reply = ask_job(job, "status")
    unanswered = ""
    while True:
        assert reply.job is not None
        yield reply.job, unanswered
        try:
            _, reply = ask_job(entry.name, "status")  # a new job that begins is not this one
            unanswered = ""
        except LaunchError as error:
            if not _is_there(entry.name):
                return
            unanswered = str(error)


def _is_there(name: str) -> bool:
    """Return whether the job runs, although its launcher did not answer."""
    try:
        find_job(os.environ, name)
    except LaunchError:
        return False
    return True


def _show_in_place(views: Iterator[tuple[JobSummary, str]], seconds: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves the terminal as it was
    first = next(views)
    with _read_keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        for summary, unanswered in itertools.chain([first], views):
            until, size = time.monotonic() + seconds, None
            while size is None or time.monotonic() < until:
                if console.size != size:
                    size = console.size
                    live.update(_paint(summary, unanswered, *size), refresh=True)
                if _LEAVING_KEYS.intersection(wait(max(0.0, min(until - time.monotonic(), _RESIZE_SECONDS)))):
                    return


def _paint(summary: JobSummary, unanswered: str, columns: int, lines: int) -> Text:
    from rich.text import Text

    screen = fit_job(summary, columns=columns, lines=lines, unanswered=unanswered)
    space = [("", "")] if screen.is_roomy else []
    titles, *ranks = screen.ranks or [""]
    styled = [
        (screen.title, "bold"),
        *((line, "yellow") for line in screen.troubles),
        *space,
        (titles, "dim"),
        *((line, "") for line in ranks),
        *((line, "dim") for line in screen.notes),
    ]
    return Text("\n", no_wrap=True, overflow="crop").join(
        Text(harmless_line(line), style) for line, style in styled[:lines]
    )


@contextmanager
def _read_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for keys, and returns those that were pressed ("": none).

    Inside the block, keys arrive one by one and are not echoed; Ctrl-C interrupts as usual.  Where stdin is not a
    terminal, or the system has none, the function only waits.  A terminal that is gone counts as q.
    """
    try:
        import termios  # neither exists on every system
        import tty
    except ImportError:
        yield _only_wait
        return
    if not os.isatty(0):
        yield _only_wait
        return

    def wait(seconds: float) -> str:
        if not select.select([0], [], [], seconds)[0]:
            return ""
        try:
            return os.read(0, 64).decode(errors="replace") or "q"
        except OSError:
            return "q"

    before = termios.tcgetattr(0)
    tty.setcbreak(0, termios.TCSANOW)
    try:
        yield wait
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


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
