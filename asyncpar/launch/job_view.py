"""A job as commands, pages and sinks see it, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from asyncpar.launch.job import LaunchJob
from asyncpar.observe.summary import JobSummary, RankAnswer


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of the job: the exit code of the launcher and the message that it prints (none after success)."""

    exit_code: int
    message: str = ""


def describe_job(job: LaunchJob) -> JobSummary:
    """Return the summary of a job before it begins."""
    now = time.time()
    return JobSummary(
        job=job.placement.job,
        pid=os.getpid(),
        time=now,
        started=now,
        phase="forming",
        command=job.command,
        nnodes=job.options.nnodes,
        log_directory="" if job.log_directory is None else str(job.log_directory),
    )


class JobWatch(Protocol):
    """The requests of commands to a launcher or an agent."""

    async def status(self) -> JobSummary:
        """Return the current state of the job, as far as it is known here."""
        ...

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        """Return the reports of ``kind`` of ``ranks`` (None: all), by rank."""
        ...


class ShownJob(JobWatch, Protocol):
    """A job that is shown to users while it runs."""

    def changed(self, **fields: object) -> None:
        """Apply changes to the summary's fields about the job itself."""
        ...
