"""The text of `asyncpar status`: who waits for whom, in one sentence, and where each rank is."""

from __future__ import annotations

import msgspec
import pytest

from asyncpar.launch.commands.job_text import MOST_LINES, holdup_of, seconds_text, show_job
from asyncpar.observe.summary import (
    BlockedSummary,
    HostSummary,
    JobSummary,
    OperationSummary,
    RankReport,
    RankSummary,
)


def report(
    rank: int,
    waits_for: tuple[int, ...] = (),
    *,
    condition: str = "well",
    site: str = "train.py:9",
    blocked: BlockedSummary | None = None,
    culprit: int | None = None,
) -> RankReport:
    operation = OperationSummary(
        label="all_reduce #4",
        kind="all_reduce",
        group="world",
        sequence=4,
        waits_for=waits_for,
        culprit=culprit,
        seconds=12.0,
        site=site,
    )
    summary = RankSummary(
        rank=rank,
        pid=100 + rank,
        time=0.0,
        user_site=site,
        operations=(operation,) if waits_for else (),
        blocked=blocked,
    )
    return RankReport(
        rank=rank, host="a", pid=100 + rank, phase="member", condition=condition, seconds=3.0, summary=summary
    )


def job(*reports: RankReport) -> JobSummary:
    return JobSummary(
        job="train", pid=1, time=30.0, started=10.0, phase="running", hosts=(HostSummary(host="a", ranks=reports),)
    )


def test_the_culprit_and_where_it_is() -> None:
    waiting = [report(rank, (2,)) for rank in (0, 1, 3)]
    text = holdup_of(job(*waiting, report(2, site="train.py:57")))
    assert text == "ranks 0, 1, 3 wait for rank 2: rank 2 is in user code at train.py:57"


def test_a_stopped_rank_is_the_culprit_with_its_last_place() -> None:
    text = holdup_of(job(report(0, (2,)), report(2, (0,), condition="stopped", site="train.py:57")))
    assert text == (
        "rank 0 waits for rank 2: rank 2 is stopped (SIGSTOP or a debugger), for 3.0 s, last seen at train.py:57"
    )


def test_a_chain_of_waits_leads_to_its_end() -> None:
    text = holdup_of(job(report(0, (1,)), report(1, (2,)), report(2, (3,)), report(3)))
    assert text.startswith("ranks 0, 1, 2 wait for rank 3: rank 3 is in user code at train.py:9")


def test_a_blocked_loop_is_said() -> None:
    blocked = BlockedSummary(what="task 'main'", where="train.py:60", seconds=4.0)
    text = holdup_of(job(report(0, (1,)), report(1, blocked=blocked)))
    assert text == "rank 0 waits for rank 1: rank 1 blocks its event loop at train.py:60, for 4.0 s"


def test_a_cycle_is_said() -> None:
    assert holdup_of(job(report(0, (1,)), report(1, (0,)))) == "ranks 0, 1 wait for each other"


def test_what_ranks_have_told_of_a_culprit_counts() -> None:
    assert holdup_of(job(report(0, (1,), culprit=3), report(1, (3,)), report(3))).startswith(
        "ranks 0, 1 wait for rank 3"
    )


def test_nothing_is_said_of_a_job_that_is_well() -> None:
    assert holdup_of(job(report(0), report(1))) == ""
    lines = show_job(job(report(0), report(1))).splitlines()
    assert lines[0] == "job train: running for 20 s, 2 ranks on 1 host"
    assert lines[2].split() == ["rank", "host", "pid", "state", "for", "what", "at"]
    assert lines[3].split() == ["0", "a", "100", "running", "train.py:9"]


def test_a_rank_that_has_told_nothing_and_one_that_has_ended() -> None:
    silent = RankReport(rank=0, host="a", pid=1)
    ended = msgspec.structs.replace(report(1), condition="ended", ending="was killed by SIGKILL")
    text = show_job(job(silent, ended))
    assert "was killed by SIGKILL" in text
    assert holdup_of(job(silent, ended)) == "rank 1 was killed by SIGKILL"


def test_many_ranks_are_cut_and_lines_fit_the_terminal() -> None:
    text = show_job(job(*(report(rank, (9999,)) for rank in range(10_000))), width=80)
    assert len(text.splitlines()) < MOST_LINES + 10
    assert max(map(len, text.splitlines())) <= 80
    assert "9936 more ranks" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.31, "0.3 s"), (12.2, "12 s"), (184.0, "3 min 4 s"), (7500.0, "2 h 5 min")]
)
def test_times(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
