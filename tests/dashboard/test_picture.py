"""Pictures are bounded, and valid JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from asyncpar.dashboard import picture as picture_module
from asyncpar.dashboard.picture import MOST_LINKED, MOST_RANKS, Painter
from asyncpar.dashboard.states import RankActivity
from asyncpar.observe.pipeline_runs import draw_run
from asyncpar.observe.summary import AskSummary, HostSummary, JobSummary, RankReport, RankSummary
from asyncpar.testing.jobs import SyntheticJob, Trouble, record_pipeline
from tests.soak import chosen

RANKS = chosen(3_000, soak=10_000)


@pytest.mark.parametrize("size", [1, 2, 64, 1000])
def test_a_picture_is_json_and_small(size: int) -> None:
    painter = Painter()
    text = ""
    for job in SyntheticJob(size, trouble=Trouble.LATE).summaries(4):
        text = json.dumps(painter.paint(job), allow_nan=False)

    picture = json.loads(text)
    assert picture["total"] == size
    assert len(picture["ranks"]) == min(size, MOST_RANKS)
    assert len(picture["links"]["ranks"]) <= MOST_LINKED
    assert len(text) < 500_000


def test_the_picture_of_thousands_of_ranks_stays_as_small_from_summary_to_summary() -> None:
    painter = Painter()
    sizes = []
    (job,) = SyntheticJob(RANKS).summaries(1)
    for second in range(2):
        picture = painter.paint(msgspec.structs.replace(job, time=job.time + second))
        sizes.append(len(json.dumps(picture, allow_nan=False)))
        assert picture["total"] == RANKS
        assert len(picture["ranks"]) == MOST_RANKS
    assert max(sizes) < 300_000
    assert len(painter._bytes) <= MOST_RANKS * MOST_RANKS  # noqa: SLF001
    assert len(painter._cpu) <= RANKS  # noqa: SLF001


def test_of_many_ranks_the_worst_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_module, "MOST_RANKS", 16)
    *_, before, job = SyntheticJob(30, trouble=Trouble.STOPPED).summaries(42)
    painter = Painter()
    painter.paint(before)
    picture = painter.paint(job)

    culprit = 30 // 3
    assert len(picture["ranks"]) == 16
    assert {row["rank"]: row["state"] for row in picture["ranks"]}[culprit] == RankActivity.STOPPED
    assert picture["counts"][str(int(RankActivity.STOPPED))] == 1


def test_rates_are_differences_of_two_pictures() -> None:
    painter = Painter()
    first, second = SyntheticJob(2).summaries(2)

    assert painter.paint(first)["links"]["cells"][0][3] is None
    picture = painter.paint(second)

    assert picture["links"]["cells"][0][3] > 0
    assert 0.5 < picture["ranks"][0]["cpu"] < 1.5


def test_operations_of_several_ranks_are_one_row_with_who_called_and_who_is_missing() -> None:
    painter = Painter()
    for job in SyntheticJob(4, trouble=Trouble.LATE).summaries(45):
        picture = painter.paint(job)

    (row,) = picture["operations"]
    assert (row["here"], row["waitsFor"], row["label"].split()[0]) == ([0, 2, 3], [1], "all_reduce")


def test_figures_of_all_ranks_are_one_row() -> None:
    (job,) = SyntheticJob(4).summaries(1)

    first = next(row for row in Painter().paint(job)["figures"] if row["what"] == "collective")

    assert (first["what"], first["name"], first["count"], first["p50"]) == ("collective", "all_reduce", 256, 8_240)
    assert (first["rate"], first["expected"]) == (4_790_000_000, 7_400)


def test_how_gradients_were_synchronized_is_the_median_of_all_ranks() -> None:
    (job,) = SyntheticJob(4).summaries(1)
    nothing = RankReport(rank=0, host="a", pid=1, summary=RankSummary(rank=0, pid=1, time=0.0))
    quiet = JobSummary(job="j", pid=1, time=0.0, hosts=(HostSummary(host="a", ranks=(nothing,)),))

    assert Painter().paint(job)["gradients"] == {"hidden": 0.79, "ratio": 3.94}
    assert Painter().paint(quiet)["gradients"] == {"hidden": None, "ratio": None}


def test_values_that_are_no_numbers_for_json_are_left_out() -> None:
    summary = RankSummary(rank=0, pid=1, time=0.0, values={"loss": float("inf"), "lr": 0.1, "x": float("nan")})
    host = HostSummary(host="a", ranks=(RankReport(rank=0, host="a", pid=1, summary=summary),))

    picture = Painter().paint(JobSummary(job="j", pid=1, time=0.0, hosts=(host,)))

    assert picture["values"] == {"lr": 0.1}
    json.dumps(picture, allow_nan=False)


def test_the_picture_of_the_end_adds_no_column() -> None:
    painter = Painter()
    jobs = list(SyntheticJob(2).summaries(3))
    for job in jobs[:2]:
        painter.paint(job)

    picture = painter.paint(jobs[2], ended="The job has ended with exit code 0.")

    assert len(picture["heat"]["columns"]) == 2
    assert picture["ended"].startswith("The job has ended")


def test_chains_of_calls_and_dead_letters_are_those_of_all_ranks() -> None:
    (job,) = SyntheticJob(1000).summaries(1)
    actors = Painter().paint(job)["actors"]
    (chain,) = actors["chains"]
    assert (chain["ranks"][:3], chain["count"], chain["caller"]) == ([1, 5, 9], 250, "")
    assert [(step["rank"], step["actor"]) for step in chain["steps"]] == [(0, "sampler"), (999, "store")]
    assert (chain["end"], chain["cycle"], chain["more"]) == ("runs read()", False, 0)
    assert actors["lettersCount"] == 3
    assert [(letter["on"], letter["sender"], letter["endpoint"]) for letter in actors["letters"]] == [
        (2, 0, "write"),
        (2, 1, "flush"),
    ]


def test_a_long_chain_is_cut() -> None:
    reports = tuple(
        RankReport(
            rank=rank,
            host="a",
            pid=1,
            summary=RankSummary(
                rank=rank,
                pid=1,
                time=0.0,
                asks=(
                    AskSummary(
                        rank=rank + 1, actor=f"a{rank + 1}", endpoint="do", caller=f"a{rank}", serves=(rank - 1, 0)
                    ),
                ),
            ),
        )
        for rank in range(50)
    )
    job = JobSummary(job="j", pid=1, time=0.0, hosts=(HostSummary(host="a", ranks=reports),))
    (chain,) = Painter().paint(job)["actors"]["chains"]
    assert (len(chain["steps"]), chain["more"]) == (16, 34)


def test_the_schedule_is_shown_as_it_was_reported() -> None:
    (job,) = SyntheticJob(2).summaries(1)
    schedule = draw_run(record_pipeline(2, micro_batches=4))
    assert Painter().paint(job, schedule=schedule)["schedule"] == schedule
    assert Painter().paint(job)["schedule"] is None
