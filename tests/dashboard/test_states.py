"""Activities of ranks, and the sentence about the job."""

from __future__ import annotations

import msgspec

from asyncpar.dashboard.states import RankActivity, describe_job, find_states
from asyncpar.observe.summary import BlockedSummary, HostSummary, JobSummary, OperationSummary, RankReport, RankSummary


def waiting(rank: int, *, on: int, seconds: float = 12.0) -> RankReport:
    operation = OperationSummary(
        label="all_reduce #4", kind="all_reduce", group="world", sequence=4, waits_for=(on,), seconds=seconds
    )
    return report(rank, operations=(operation,))


def report(rank: int, **summary: object) -> RankReport:
    reported = RankSummary(rank=rank, pid=1, time=0.0, **summary)  # type: ignore[arg-type]
    return RankReport(rank=rank, host=f"host-{rank}", pid=1, summary=reported)


def job(*reports: RankReport) -> JobSummary:
    return JobSummary(job="j", pid=1, time=0.0, hosts=(HostSummary(host="h", ranks=reports),))


def sentence(*reports: RankReport) -> str:
    made = job(*reports)
    return describe_job(made, find_states(made))


def test_the_rank_that_others_wait_for_holds_them_up() -> None:
    made = job(waiting(0, on=2), waiting(1, on=2), report(2, user_site="train.py:57"), waiting(3, on=2))

    assert find_states(made)[2] is RankActivity.HOLDS_UP
    assert sentence(*made.ranks) == (
        "ranks 0, 1, 3 wait for rank 2 (host-2), which is in user code at train.py:57; all_reduce #4 has waited 12 s."
    )


def test_the_end_of_a_chain_is_the_culprit() -> None:
    made = job(waiting(0, on=1), waiting(1, on=2), report(2))

    assert [find_states(made)[rank] for rank in range(3)] == [
        RankActivity.WAITS,
        RankActivity.WAITS,
        RankActivity.HOLDS_UP,
    ]


def test_ranks_in_a_circle_wait_for_each_other() -> None:
    assert sentence(waiting(0, on=1), waiting(1, on=0)) == (
        "ranks 0, 1 wait for each other in one operation: the link between them carries nothing; "
        "all_reduce #4 has waited 12 s."
    )


def test_a_rank_that_reports_nothing_is_silent_and_not_blocked() -> None:
    quiet = msgspec.structs.replace(report(1), age=60.0)

    assert find_states(job(waiting(0, on=1), quiet)) == {0: RankActivity.WAITS, 1: RankActivity.SILENT}


def test_a_culprit_that_is_stopped_is_reported_as_stopped() -> None:
    stopped = RankReport(rank=1, host="b", pid=1, condition="stopped", seconds=7.0)

    assert sentence(waiting(0, on=1), stopped) == (
        "rank 0 waits for rank 1 (b), which is stopped (SIGSTOP, or a debugger), for 7.0 s; "
        "all_reduce #4 has waited 12 s."
    )


def test_a_culprit_that_blocks_its_loop_is_reported_with_the_place() -> None:
    blocked = report(1, blocked=BlockedSummary(what="json.load", where="data.py:112", seconds=3.0))

    assert "rank 1 (host-1), which blocks its event loop in json.load at data.py:112" in sentence(
        waiting(0, on=1), blocked
    )


def test_a_rank_of_another_host_that_nobody_knows_is_named_too() -> None:
    assert sentence(waiting(0, on=9)) == (
        "rank 0 waits for rank 9, which is not known here; all_reduce #4 has waited 12 s."
    )


def test_a_failed_rank_comes_first() -> None:
    dead = RankReport(rank=1, host="b", pid=1, condition="ended", ending="was killed by SIGKILL")

    assert sentence(waiting(0, on=1), dead) == "rank 1 (b) was killed by SIGKILL."


def ended(rank: int, *, ago: float, blames: int | None = None, ending: str = "exited with code 1") -> RankReport:
    return RankReport(rank=rank, host="b", pid=1, condition="ended", seconds=ago, ending=ending, blames=blames)


def test_the_rank_that_failed_by_itself_is_named_not_the_lowest_nor_its_victims() -> None:
    victims = (ended(0, ago=9.0, blames=1), ended(1, ago=4.0, blames=2), ended(3, ago=6.0, blames=2))

    assert sentence(ended(2, ago=5.0), *victims) == (
        "rank 2 (b) exited with code 1; ranks 0, 1, 3 have failed because of that."
    )
    assert sentence(ended(2, ago=5.0, ending="was killed by SIGSEGV"), ended(1, ago=6.0)) == (
        "rank 1 (b) exited with code 1."
    )


def test_ranks_that_gave_up_on_one_that_has_not_failed_name_it() -> None:
    stopped = RankReport(rank=2, host="b", pid=1, condition="stopped", seconds=7.0)
    left = RankReport(rank=2, host="b", pid=1, condition="ended", ending="exited with code 0")

    assert sentence(ended(0, ago=1.0, blames=2), stopped) == (
        "rank 2 (b) is stopped (SIGSTOP, or a debugger), for 7.0 s; rank 0 has failed because of that."
    )
    assert sentence(ended(0, ago=1.0, blames=2), left) == (
        "rank 2 (b) exited with code 0; rank 0 has failed because of that."
    )
    assert sentence(ended(0, ago=1.0, blames=1), ended(1, ago=2.0, blames=0)) == (
        "rank 0 (b) exited with code 1; rank 1 has failed because of that."
    )


def test_a_job_that_something_slows_down_is_not_said_to_be_held_up_by_nothing() -> None:
    slow = msgspec.structs.replace(job(report(0), report(1)), alarms=("rank 1 is slow: ...",))

    assert describe_job(slow, find_states(slow)) == "All 2 ranks run, slower than they could."


def test_a_short_operation_is_no_waiting() -> None:
    assert sentence(waiting(0, on=1, seconds=0.3), report(1)) == "All 2 ranks run; nothing holds them up."


def test_jobs_without_ranks_and_ended_ones_have_their_sentences() -> None:
    ended = RankReport(rank=0, host="a", pid=1, condition="ended", ending="exited with code 0")

    assert sentence() == "No rank has started yet."
    assert sentence(ended) == "The rank has ended."
    assert sentence(RankReport(rank=0, host="a", pid=1)) == "The ranks have started; none has joined a world yet."
