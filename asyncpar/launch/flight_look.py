"""Look at what the ranks of a job have recorded: what holds it up, and the last events of each rank."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncpar.errors import ProtocolError
from asyncpar.launch.stack_answers import sort_answers
from asyncpar.observe.explain import RankFacts, explain
from asyncpar.observe.holdups import describe_holdups
from asyncpar.observe.image import Event, RankImage, read_image
from asyncpar.observe.summary import JobSummary, RankAnswer

if TYPE_CHECKING:
    from asyncpar.launch.job_view import JobWatch
    from asyncpar.observe.stack_views import TaskView

MOST_EVENTS: Final = 400
"""Events that are shown of all ranks together, the latest of each."""

MOST_KNOWN: Final = 16
"""Sentences of the status of the job, which count where events explain nothing."""

_MOST_OF_RANK: Final = 32
_LOOKED_AT: Final = 512
"""Events of a rank that are read: those under way, and the last so many."""


async def look_at_flight(view: JobWatch) -> dict[str, Any]:
    """Ask all ranks of ``view`` for their events and stacks; return findings and events as plain values."""
    images, stacks = await asyncio.gather(view.collect("image", None), view.collect("stacks", None))
    job = await view.status()
    known = [*describe_holdups(job), *job.alarms]
    return await asyncio.to_thread(_describe, images, facts_of(job, stacks)) | {"known": known[:MOST_KNOWN]}


def facts_of(job: JobSummary, stacks: Sequence[RankAnswer]) -> dict[int, RankFacts]:
    """Return what agents see of the ranks of ``job``, and where the ranks' main tasks are."""
    told, _ = sort_answers(stacks)
    facts = {}
    for report in job.ranks:
        known = told.get(report.rank)
        tasks = () if known is None else known.tasks
        doing = next((_doing(task) for task in tasks if task.serves is None and _doing(task)), "")
        facts[report.rank] = RankFacts(condition=report.condition, detail=report.ending, doing=doing)
    return facts


def _doing(task: TaskView) -> str:
    """Return where a task of the program is; "" for one of asyncpar."""
    place = task.user_frame
    if place is None:
        return ""
    inner = task.frames[-1]
    return place.site if inner is place else f"{inner.function}, called at {place.site}"


def _describe(answers: Sequence[RankAnswer], facts: Mapping[int, RankFacts]) -> dict[str, Any]:
    images: dict[int, RankImage] = {}
    problems: list[str] = []
    for answer in answers:
        try:
            if answer.error:
                raise ProtocolError(answer.error)
            images[answer.rank] = read_image(answer.content, latest=_LOOKED_AT)
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
