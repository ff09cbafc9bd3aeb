"""The text of `asyncpar status`: who waits for whom, and where each rank is."""

from __future__ import annotations

import msgspec

from asyncpar.launch.commands.job_text import MOST_HOLDUPS, MOST_LINES, TITLES, name_dashboard, row_of, show_job
from asyncpar.observe.summary import (
    HostSummary,
    JobSummary,
    OperationSummary,
    PastGeneration,
    RankReport,
    RankSummary,
)


def report(
    rank: int,
    waits_for: tuple[int, ...] = (),
) -> RankReport:
    operation = OperationSummary(
        label="all_reduce #4",
        kind="all_reduce",
        group="world",
        sequence=4,
        waits_for=waits_for,
        seconds=12.0,
        site="train.py:9",
    )
    summary = RankSummary(
        rank=rank,
        pid=100 + rank,
        time=0.0,
        user_site="train.py:9",
        operations=(operation,) if waits_for else (),
    )
    return RankReport(rank=rank, host="a", pid=100 + rank, phase="member", summary=summary)


def job(*reports: RankReport) -> JobSummary:
    return JobSummary(
        job="train", pid=1, time=30.0, started=10.0, phase="running", hosts=(HostSummary(host="a", ranks=reports),)
    )


def test_nothing_is_reported_of_a_job_that_is_well() -> None:
    lines = show_job(job(report(0), report(1))).splitlines()
    assert lines[0] == "job train: running for 20 s, 2 ranks on 1 host"
    assert lines[2].split() == ["rank", "host", "pid", "state", "for", "what", "at"]
    assert lines[3].split() == ["0", "a", "100", "running", "train.py:9"]


def test_a_rank_that_is_read_from_outside_has_a_place_and_what_it_does_there() -> None:
    stopped = msgspec.structs.replace(
        report(1), condition="stopped", seconds=3.0, place="t.py:5", doing="is in user code at t.py:5"
    )
    for each in (stopped, msgspec.structs.replace(stopped, summary=None)):
        row = dict(zip(TITLES, row_of(each), strict=True))
        assert (row["state"], row["for"], row["what"], row["at"]) == ("stopped", "3.0 s", "is in user code", "t.py:5")


def test_the_last_reasons_why_ranks_began_again_are_listed_the_newest_first() -> None:
    past = tuple(PastGeneration(generation=n, time=20.0 + n, reason=f"reason {n}") for n in range(6))
    lines = show_job(msgspec.structs.replace(job(report(0)), generation=6, restarts=6, past=past)).splitlines()
    assert lines[0] == "job train: running for 20 s, 1 rank on 1 host, generation 6, 6 restarts"
    assert lines[1:6] == [
        *(f"began again {10 - n}.0 s ago: reason {n}" for n in (5, 4, 3, 2)),
        "... and 2 times before that",
    ]


def test_the_address_of_the_page_is_shown_or_how_to_get_one() -> None:
    with_page = msgspec.structs.replace(job(report(0)), dashboard="http://127.0.0.1:8787/#secret")
    assert name_dashboard(with_page) == "dashboard: http://127.0.0.1:8787/#secret"
    assert name_dashboard(job(report(0))).startswith("no dashboard (`asyncpar launch --dashboard` has one;")


def test_the_place_where_others_may_have_a_page_is_named() -> None:
    other_host = name_dashboard(job(report(0)), is_whole=False)
    assert other_host == "no dashboard here (`asyncpar status` on the first host says where that of the whole job is)"
    assert name_dashboard(job(), is_agent=True).startswith("no dashboard here (`asyncpar agent --dashboard` has one")


def test_a_rank_that_has_reported_nothing_and_one_that_has_ended() -> None:
    silent = RankReport(rank=0, host="a", pid=1)
    ended = msgspec.structs.replace(report(1), condition="ended", ending="was killed by SIGKILL")
    lines = show_job(job(silent, ended)).splitlines()
    assert lines[1:3] == ["rank 1 (a) was killed by SIGKILL", ""]


def test_a_rank_in_no_operation_says_what_it_does_and_one_that_reports_nothing_how_old_that_is() -> None:
    summary = RankSummary(rank=0, pid=100, time=0.0, user_site="train.py:9", doing="sleeps at train.py:9")
    sleeping = msgspec.structs.replace(report(0), summary=summary)
    stopped = msgspec.structs.replace(sleeping, rank=1, condition="stopped", seconds=17.0, age=16.0)
    lines = show_job(job(sleeping, stopped)).splitlines()
    assert lines[1] == "rank 1 (a) is stopped (SIGSTOP, or a debugger), for 17 s"
    assert lines[4].split() == ["0", "a", "100", "running", "sleeps", "train.py:9"]
    assert lines[5].split() == [
        "1",
        "a",
        "100",
        "stopped",
        "(reported",
        "16",
        "s",
        "ago)",
        "17",
        "s",
        "sleeps",
        "train.py:9",
    ]


def test_many_ranks_are_cut_and_lines_fit_the_terminal() -> None:
    text = show_job(job(*(report(rank, (9999,)) for rank in range(10_000))), width=80)
    assert len(text.splitlines()) < MOST_LINES + 10
    assert max(map(len, text.splitlines())) <= 80
    assert "9936 more ranks" in text


def test_many_sentences_are_cut() -> None:
    ended = (msgspec.structs.replace(report(rank), condition="ended", ending="was killed") for rank in range(50))
    lines = show_job(job(*ended)).splitlines()
    assert lines[MOST_HOLDUPS + 1 : MOST_HOLDUPS + 3] == [f"... and {50 - MOST_HOLDUPS} more", ""]
