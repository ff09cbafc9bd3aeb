"""`asyncpar top`: the status of a job, refreshed in place until it ends or the user presses q or Ctrl-C."""

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

_RESIZE_SECONDS = 0.2
"""Seconds between checks of the terminal's size."""

_LEAVING_KEYS = frozenset("qQ\x04")
"""q and Ctrl-D."""


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

    from asyncpar.launch.commands.job_screen import fit_job

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
