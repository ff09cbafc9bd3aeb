"""An inspection of the last run of a job's pipeline: the computations of each rank, and their times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from asyncpar.observe.pipeline_runs import MOST_ROWS, PipelineSummary, draw_run
from asyncpar.observe.summary import JobSummary, RankReport, unpack

if TYPE_CHECKING:
    from asyncpar.launch.job_view import JobWatch


async def look_at_pipeline(view: JobWatch, job: JobSummary) -> dict[str, Any] | None:
    """Ask the ranks of one pipeline for their last runs, and return the result of ``draw_run``.

    Of several pipelines it is that of the lowest rank.  None: no rank reports one.
    """
    first = next((report.rank for report in job.ranks if _has_pipeline(report)), None)
    if first is None:
        return None
    told = await _ask(view, [first])
    ranks = told[0].ranks if told else ()
    others = [rank for rank in ranks if rank != first][: MOST_ROWS - 1]
    if others:
        told += [one for one in await _ask(view, others) if one.ranks == ranks]
    return await asyncio.to_thread(draw_run, told)


def _has_pipeline(report: RankReport) -> bool:
    summary = report.summary
    return summary is not None and any(figure.what == "pipeline" for figure in summary.figures)


async def _ask(view: JobWatch, ranks: Sequence[int]) -> list[PipelineSummary]:
    """Return the reports of those of ``ranks`` that answer."""
    told = []
    for answer in await view.collect("pipeline", ranks):
        with suppress(msgspec.DecodeError):  # no answer: it is stopped, for instance
            told.append(unpack(answer.content, PipelineSummary))
    return told
