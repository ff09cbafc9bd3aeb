"""`asyncpar top`: the status of a job again and again, in place, until it ends or Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import click

from asyncpar.errors import LaunchError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result
from asyncpar.launch.commands.job_choice import ask_job, job_argument
from asyncpar.launch.job_directory import find_job
from asyncpar.launch.options import parse_seconds
from asyncpar.observe.summary import JobSummary


@click.command(cls=OneLineCommand)
@option("--every", metavar="SECONDS", default="1", help="How often to look.  [1]")
@job_argument
def top(job: str | None, every: str, *, as_json: bool) -> None:
    """Show what each rank does, again and again, until the job ends or Ctrl-C.

    JOB is the name of a job that runs on this host; it is needed only if there
    are several.  In a terminal the picture stays in place; elsewhere one
    follows the other.  Exits with code 1 if no job answers.
    """
    exit_with("top", lambda: _top(job, every, as_json=as_json))


def _top(job: str | None, every: str, *, as_json: bool) -> int:
    looks = _look(job, parse_seconds("--every", every))
    with suppress(KeyboardInterrupt):  # which is how one leaves it
        if as_json or not sys.stdout.isatty():
            _print_all(looks, as_json=as_json)
        else:
            _show_in_place(looks)
    return 0


def _print_all(looks: Iterator[JobSummary], *, as_json: bool) -> None:
    from asyncpar.launch.commands.job_text import show_job
    from asyncpar.observe.summary import to_json

    for summary in looks:
        print_result("the job", to_json(summary) + b"\n" if as_json else show_job(summary) + "\n")


def _look(job: str | None, seconds: float) -> Iterator[JobSummary]:
    """Yield the job as it is, every so often, until it has ended.  Raises ``LaunchError`` if it never was there."""
    name = job
    while True:
        try:
            entry, reply = ask_job(name, "status")
        except LaunchError:
            if name is job:
                raise
            if not _is_there(name):
                return
        else:
            assert reply.job is not None
            name = entry.name  # another job that begins is not this one
            yield reply.job
        time.sleep(seconds)


def _is_there(name: str | None) -> bool:
    """Does the job run, although its launcher did not answer?"""
    try:
        find_job(os.environ, name)
    except LaunchError:
        return False
    return True


def _show_in_place(looks: Iterator[JobSummary]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from asyncpar.launch.commands.job_text import show_job

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for summary in looks:
            text = show_job(summary, width=max(20, console.width))
            head, blank, table = text.partition("\n\n")
            title, _, trouble = head.partition("\n")
            told = (f"{trouble}\n", "yellow") if trouble else ""
            picture = Text.assemble((f"{title}\n", "bold"), told, blank[1:], table, no_wrap=True, overflow="crop")
            live.update(picture, refresh=True)
