"""The post-mortem of one job of a long-lived agent: opened when the job begins here, written when it has failed."""

from __future__ import annotations

from collections.abc import Callable

from asyncpar.errors import UsageError
from asyncpar.launch.agents.job_record import JobEnd, SubmittedJob
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.launch.reaper_client import ReaperClient


def open_remains(
    place: HostPlace,
    number: int,
    record: SubmittedJob,
    reaper: ReaperClient,
    report: Callable[[str], None],
    *,
    process: str = "agent",
) -> PostMortem | None:
    """Return the folder for the remains of job ``number``; None if none is wanted, or it cannot be created now.

    ``process`` is the kind of process that runs the ranks: this host's agent, or a launcher that is one for its job.
    """
    if place.post_mortem is None:
        return None
    try:
        remains = PostMortem.open(
            place.post_mortem,
            job=record.name if place.is_launcher else f"{record.name}.{number}",
            host=place.host,
            command=(record.program, *record.arguments),
            environment={**place.environment, **record.environment},
            process=process,
        )
    except UsageError as error:
        report(f"job {number} runs without a post-mortem: {error}")
        return None
    reaper.explain(remains.folder)
    return remains


def explain_remains(
    remains: PostMortem,
    exit_code: int,
    failure: str,
    end: JobEnd | None,
    reaper: ReaperClient,
    report: Callable[[str], None],
) -> None:
    """Write the summary if the job, or a rank of it here (``exit_code``, ``failure``), has failed."""
    has_failed = exit_code != 0 or (end is not None and end.exit_code != 0)
    remains.finish(has_failed=has_failed, message=failure or ("" if end is None else end.message))
    reaper.forget_folder()
    if text := remains.describe():
        report(text)
