"""`asyncpar flight`: dump the recent operations of all ranks, and explain what holds a job up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.command_line import OneLineCommand, UncutGroup, exit_with, option, print_line
from asyncpar.launch.commands.job_choice import ask_job
from asyncpar.launch.commands.trace import ask_rings

if TYPE_CHECKING:
    from asyncpar.observe.explain import RankFacts
    from asyncpar.observe.summary import JobSummary


@click.group(cls=UncutGroup)
def flight() -> None:
    """Dump what all ranks did lately, and explain what holds a job up."""


@flight.command(cls=OneLineCommand)
@option("--output", "-o", metavar="DIR", default="flight", help="The folder to write into.  [flight]")
@option("--torch", "for_torch", is_flag=True, help="Also in torch's format: torchfrtrace -p torch_rank_ DIR")
@click.argument("job", required=False, default=None)
def dump(job: str | None, output: str, *, for_torch: bool) -> None:
    """Write the events of all ranks of a running job into a folder.

    Nothing stops, and nothing is asked of the ranks' event loops.
    """
    exit_with("flight dump", lambda: _dump(job, Path(output), for_torch=for_torch))


def _dump(job: str | None, folder: Path, *, for_torch: bool) -> int:
    from asyncpar.observe.dump_folder import write_dumps

    images, silent = ask_rings(job)
    try:
        write_dumps(folder, images, ask_facts(job), for_torch=for_torch)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be written: {os_reason(error)}") from error
    ranks = "1 rank" if len(images) == 1 else f"{len(images)} ranks"
    print_line(f"{folder}: events of {ranks}; `asyncpar flight explain {folder}` says what holds the job up")
    for rank, why in sorted(silent.items()):
        print_line(f"rank {rank} is not in it: {why}", err=True)
    return 0


@flight.command(cls=OneLineCommand)
@option("--job", metavar="JOB", default=None, help="Look at this job, where several run here.")
@click.argument("folder", required=False, default=None)
def explain(folder: str | None, job: str | None) -> None:
    """Name the rank that holds a job up, and the cause.

    FOLDER is one that `asyncpar flight dump` wrote; without it, the job that
    runs on this host is looked at.
    """
    exit_with("flight explain", lambda: _explain(folder, job))


def _explain(folder: str | None, job: str | None) -> int:
    from asyncpar.observe.dump_folder import describe_findings, explain_dumps
    from asyncpar.observe.holdups import describe_holdups
    from asyncpar.observe.image import read_image

    if folder is not None and job is not None:
        raise UsageError(f"FOLDER: expected without --job, got {folder!r}; a folder has one job")
    if folder is not None:
        print_line(explain_dumps(Path(folder)))
        return 0
    images, silent = ask_rings(job)
    found = {rank: read_image(image) for rank, image in images.items()}
    problems = [f"rank {rank}: {why}" for rank, why in sorted(silent.items())]
    known, facts = _ask(job)
    print_line(describe_findings(found, facts, problems, [*describe_holdups(known), *known.alarms]))
    return 0


def ask_facts(job: str | None) -> dict[int, RankFacts]:
    """Return the ranks' current reports of themselves, and the job's status for those that do not answer."""
    return _ask(job)[1]


def _ask(job: str | None) -> tuple[JobSummary, dict[int, RankFacts]]:
    from asyncpar.launch.page_views import facts_of

    _, reply = ask_job(job, "status")
    assert reply.job is not None
    known = reply.job.renewed(ask_job(job, "summary")[1].ranks)
    return known, facts_of(known)
