"""Views of the last run of a job's pipeline: which ranks are asked, and what those that do not answer leave out."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncpar.launch.page_views import view_pipeline
from asyncpar.observe.pipeline_runs import PipelineSummary
from asyncpar.observe.summary import JobSummary, RankAnswer, pack
from asyncpar.testing.jobs import SyntheticJob, record_pipeline


class Stages:
    """A job in which the ranks of ``reports`` answer; the others do not, or have no pipeline."""

    def __init__(self, reports: Iterable[PipelineSummary]) -> None:
        self._reports = {one.identity.rank: pack(one) for one in reports}
        self.asked: list[list[int]] = []

    async def status(self) -> JobSummary:
        raise NotImplementedError

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        assert kind == "pipeline"
        assert ranks is not None
        self.asked.append(list(ranks))
        silent = RankAnswer(rank=0, host="h", error="it is stopped")
        return [
            RankAnswer(rank=rank, host="h", content=self._reports[rank]) if rank in self._reports else silent
            for rank in self.asked[-1]
        ]


def job_of(size: int) -> JobSummary:
    (job,) = SyntheticJob(size).summaries(1)
    return job


async def test_the_ranks_of_the_first_ranks_pipeline_are_asked_and_no_others() -> None:
    stages = Stages(record_pipeline(4, micro_batches=8))
    run = await view_pipeline(stages, job_of(1000))
    assert stages.asked == [[0], [1, 2, 3]]
    assert run is not None
    assert [row["rank"] for row in run["rows"]] == [0, 1, 2, 3]


async def test_stages_that_do_not_answer_are_left_out() -> None:
    first, _, third, fourth = record_pipeline(4, micro_batches=8)
    elsewhere = msgspec.structs.replace(fourth, ranks=(3, 9))
    run = await view_pipeline(Stages([first, third, elsewhere]), job_of(4))
    assert run is not None
    assert [row["rank"] for row in run["rows"]] == [0, 2]
    assert run["total"] == 4
    assert await view_pipeline(Stages([]), job_of(4)) is None


async def test_a_job_without_a_pipeline_is_not_asked() -> None:
    job = job_of(2)
    hosts = tuple(
        msgspec.structs.replace(
            host, ranks=tuple(msgspec.structs.replace(report, summary=None) for report in host.ranks)
        )
        for host in job.hosts
    )
    stages = Stages([])
    assert await view_pipeline(stages, msgspec.structs.replace(job, hosts=hosts)) is None
    assert stages.asked == []
