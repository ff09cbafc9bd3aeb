"""Pictures of `asyncpar top` fit the terminal, and what matters is there however small that is."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from asyncpar.launch.commands.top import HINT, JobScreen, fit_job
from asyncpar.observe.summary import JobSummary, RankReport
from tests.launch.commands.test_job_text import job, report

SIZES = list(itertools.product([20, 40, 79, 80, 200], [3, 6, 10, 11, 12, 24, 60]))


def lines_of(screen: JobScreen) -> list[str]:
    space = [""] if screen.is_roomy else []
    return [screen.title, *screen.troubles, *space, *screen.ranks, *screen.notes]


def hanging(ranks: int, culprit: int) -> JobSummary:
    return job(*(report(rank, (culprit,) if rank != culprit else ()) for rank in range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 9, 200])
def test_every_line_fits_and_so_do_all(ranks: int) -> None:
    jobs = [hanging(ranks, ranks // 2), job(*map(report, range(ranks))), job()]
    jobs += [msgspec.structs.replace(made, alarms=("rank 1 is slow " * 20,)) for made in jobs]
    for made, (columns, lines) in itertools.product(jobs, SIZES):
        shown = lines_of(fit_job(made, columns=columns, lines=lines, unanswered="it does not answer"))
        assert len(shown) <= lines
        assert max(map(len, shown)) <= columns


def test_forty_columns_and_ten_lines_show_culprit_place_and_who_waits() -> None:
    screen = fit_job(hanging(64, 41), columns=40, lines=10)
    troubles = " ".join(line.strip() for line in screen.troubles)
    assert troubles.startswith(
        "ranks 0-40, 42-63 wait for rank 41 (a), which is in user code at train.py:9; all_reduce #4"
    )
    assert screen.ranks[0].split()[0] == "rank"
    assert "41" in [line.split()[0] for line in screen.ranks[1:]]
    assert screen.notes == [f"... and {64 - len(screen.ranks) + 1} more ranks"]


def test_columns_without_room_are_left_out_and_places_stay() -> None:
    [titles, first, *_] = fit_job(hanging(2, 1), columns=40, lines=24).ranks
    assert titles.split() == ["rank", "state", "what", "at"]
    assert first.split()[0] == "0"
    assert first.endswith("train.py:9")
    assert fit_job(hanging(2, 1), columns=100, lines=24).ranks[0].split() == [
        *("rank", "host", "pid", "state", "for", "what", "at")
    ]


def test_ranks_that_hold_the_job_up_are_not_left_out() -> None:
    stopped = msgspec.structs.replace(report(77), condition="stopped", seconds=3.0)
    reports = [stopped if rank == 77 else report(rank, (50,) if rank == 90 else ()) for rank in range(100)]
    screen = fit_job(job(*reports), columns=80, lines=10)
    assert {50, 77, 90} <= {int(line.split()[0]) for line in screen.ranks[1:]}
    assert len(screen.ranks[1:]) + int(screen.notes[0].split()[2]) == 100


def test_a_launcher_that_does_not_answer_is_reported_first() -> None:
    screen = fit_job(hanging(2, 1), columns=80, lines=24, unanswered="the launcher of the job does not answer")
    assert screen.troubles[0] == "the launcher of the job does not answer"
    assert screen.notes == [HINT]


def test_a_rank_that_reported_nothing_has_its_line() -> None:
    screen = fit_job(job(RankReport(rank=0, host="a", pid=1)), columns=40, lines=10)
    assert screen.ranks[1].split() == ["0", "a", "1", "running"]
