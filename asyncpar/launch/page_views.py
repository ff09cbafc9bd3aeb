"""Views of a job that a page asks ranks for: events with what holds the job up, and the last run of its pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncpar.errors import ProtocolError
from asyncpar.observe.explain import RankFacts, explain
from asyncpar.observe.holdups import describe_holdups, describe_rank, find_trouble
from asyncpar.observe.image import Event, RankImage, read_image
from asyncpar.observe.pipeline_runs import MOST_ROWS, PipelineSummary, draw_run
from asyncpar.observe.summary import JobSummary, RankAnswer, RankReport, unpack

if TYPE_CHECKING:
    from asyncpar.launch.job_view import JobWatch

MOST_EVENTS: Final = 400
"""Events of all ranks together that are shown, the latest of each."""

MOST_KNOWN: Final = 16
"""The most sentences from the status of the job; they matter where events explain nothing."""

_MOST_OF_RANK: Final = 32
_MOST_READ: Final = 512
"""Events of a rank that are read: those under way, and the last ones up to this number."""


async def view_flight(view: JobWatch) -> dict[str, Any]:
    """Ask all ranks of ``view`` for their events; return findings and events as plain values."""
    images = await view.collect("image", None)
    job = (await view.status()).renewed(await view.collect("summary", None))
    known = [*describe_holdups(job), *job.alarms]
    return await asyncio.to_thread(_describe_events, images, facts_of(job)) | {"known": known[:MOST_KNOWN]}


def facts_of(job: JobSummary) -> dict[int, RankFacts]:
    """Return the facts about the ranks of ``job`` besides their events, in the words of its status.

    The status should be ``renewed``: a report of up to a second before the events were read is of another moment.
    """
    return {
        report.rank: RankFacts(
            condition=report.condition,
            detail=report.ending,
            doing=_doing(report),
        )
        for report in job.ranks
    }


def _doing(report: RankReport) -> str:
    if find_trouble(report):
        return describe_rank(report)
    return "" if report.summary is None else report.summary.doing


def _describe_events(answers: Sequence[RankAnswer], facts: Mapping[int, RankFacts]) -> dict[str, Any]:
    images: dict[int, RankImage] = {}
    problems: list[str] = []
    for answer in answers:
        try:
            if answer.error:
                raise ProtocolError(answer.error)
            images[answer.rank] = read_image(answer.content, latest=_MOST_READ)
        except ProtocolError as error:
            problems.append(f"rank {answer.rank}: {error}")
    findings = [
        {"ranks": list(one.culprits), "cause": str(one.cause), "text": one.text} for one in explain(images, facts)
    ]
    shared = max(1, MOST_EVENTS // max(1, len(images)))
    events = [
        _event(image, event)
        for image in images.values()
        for event in sorted(image.events, key=lambda event: event.ticket)[-min(shared, _MOST_OF_RANK) :]
    ]
    return {"findings": findings, "problems": problems[:32], "events": events[:MOST_EVENTS], "ranks": len(images)}


def _event(image: RankImage, event: Event) -> dict[str, Any]:
    group = image.groups.get(event.group)
    now = max((one.ended or one.created for one in image.events), default=0.0)
    return {
        "rank": image.rank,
        "ticket": event.ticket,
        "kind": event.kind.name.lower(),
        "name": event.name[:60],
        "text": event.text[:120],
        "group": "" if group is None else group.name,
        "sequence": event.sequence,
        "state": event.state.name.lower(),
        "bytes": event.nbytes,
        "ago": round(now - event.created, 6),
        "seconds": None if event.ended is None else round(event.ended - event.created, 6),
        "peer": event.peer,
        "site": "" if event.site is None else str(event.site),
    }


async def view_pipeline(view: JobWatch, job: JobSummary) -> dict[str, Any] | None:
    """Ask the ranks of one pipeline for their last runs, and return the result of ``draw_run``.

    Of several pipelines it is that of the lowest rank.  None: no rank reports one.
    """
    first = next((report.rank for report in job.ranks if _has_pipeline(report)), None)
    if first is None:
        return None
    runs = await _read_runs(view, [first])
    ranks = runs[0].ranks if runs else ()
    others = [rank for rank in ranks if rank != first][: MOST_ROWS - 1]
    if others:
        runs += [run for run in await _read_runs(view, others) if run.ranks == ranks]
    return await asyncio.to_thread(draw_run, runs)


def _has_pipeline(report: RankReport) -> bool:
    summary = report.summary
    return summary is not None and any(figure.what == "pipeline" for figure in summary.figures)


async def _read_runs(view: JobWatch, ranks: Sequence[int]) -> list[PipelineSummary]:
    """Return the last runs of those of ``ranks`` that answer."""
    runs = []
    for answer in await view.collect("pipeline", ranks):
        with suppress(msgspec.DecodeError):  # no answer: it is stopped, for instance
            runs.append(unpack(answer.content, PipelineSummary))
    return runs
