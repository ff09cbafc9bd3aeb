"""Waits found in the summaries of a job: the sentences are those of launchers."""

from __future__ import annotations

import msgspec
import pytest

from asyncpar.core.observe.waits import CONDITION_WORDS, WaitNotice
from asyncpar.dashboard.states import RankActivity, describe_job, find_states
from asyncpar.launch.commands.job_text import show_job
from asyncpar.launch.wait_board import WaitBoard, WaitReport
from asyncpar.observe.holdups import describe_holdups, describe_rank, find_odd_calls, find_waits
from asyncpar.observe.summary import (
    AskSummary,
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
    asks: tuple[AskSummary, ...] = (),
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
        asks=asks,
    )
    return RankReport(
        rank=rank, host="a", pid=100 + rank, phase="member", condition=condition, seconds=3.0, summary=summary
    )


def test_what_a_rank_reported_is_replaced_by_what_is_read_from_outside_while_it_does_not_answer() -> None:
    stuck = report(1, blocked=BlockedSummary(what="task 'a'", where="train.py:9", seconds=2.0))
    assert describe_rank(stuck) == "blocks its event loop in task 'a' at train.py:9, for 2.0 s"
    later = msgspec.structs.replace(stuck, age=3.0, place="train.py:40", doing="is in user code at train.py:40")
    assert describe_rank(later) == "blocks its event loop at train.py:40, for 5.0 s"
    hung = msgspec.structs.replace(later, condition="hung", seconds=6.0)
    assert describe_rank(hung) == f"{CONDITION_WORDS['hung']}, for 6.0 s, at train.py:40"


def job(*reports: RankReport) -> JobSummary:
    return JobSummary(
        job="train", pid=1, time=30.0, started=10.0, phase="running", hosts=(HostSummary(host="a", ranks=reports),)
    )


def holdup_of(made: JobSummary) -> str:
    [text] = describe_holdups(made)
    return text


def test_the_culprit_and_where_it_is() -> None:
    waiting = [report(rank, (2,)) for rank in (0, 1, 3)]
    text = holdup_of(job(*waiting, report(2, site="train.py:57")))
    assert text == (
        "ranks 0, 1, 3 wait for rank 2 (a), which is in user code at train.py:57; "
        "all_reduce #4 at train.py:9 has waited 12 s"
    )


def test_a_stopped_rank_is_the_culprit_with_its_last_place() -> None:
    text = holdup_of(job(report(0, (2,)), report(2, (0,), condition="stopped", site="train.py:57")))
    assert text == (
        "rank 0 waits for rank 2 (a), which is stopped (SIGSTOP, or a debugger), for 3.0 s, last seen at train.py:57; "
        "all_reduce #4 at train.py:9 has waited 12 s"
    )


def test_a_chain_of_waits_leads_to_its_end() -> None:
    text = holdup_of(job(report(0, (1,)), report(1, (2,)), report(2, (3,)), report(3)))
    assert text.startswith("ranks 0-2 wait for rank 3 (a), which is in user code at train.py:9")


def test_a_blocked_loop_is_reported() -> None:
    blocked = BlockedSummary(what="task 'main'", where="train.py:60", seconds=4.0)
    text = holdup_of(job(report(0, (1,)), report(1, blocked=blocked)))
    assert text.startswith(
        "rank 0 waits for rank 1 (a), which blocks its event loop in task 'main' at train.py:60, for 4.0 s; "
    )


def test_a_cycle_is_reported() -> None:
    assert holdup_of(job(report(0, (1,)), report(1, (0,)))) == (
        "ranks 0, 1 wait for each other in one operation: the link between them carries nothing; "
        "all_reduce #4 at train.py:9 has waited 12 s"
    )


ASK = AskSummary(rank=1, actor="loader", endpoint="load", seconds=12.0, site="train.py:20")
NOTICE = WaitNotice(
    operation="load() of actor 'loader'",
    seconds=10.0,
    site="train.py:20",
    culprit=2,
    host="a",
    where="sleeps at store.py:5",
    actor="store",
)


def test_a_wait_for_an_actor_is_reported() -> None:
    made = job(report(0, asks=(ASK,)), report(1))
    assert holdup_of(made) == (
        "rank 0 waits for actor 'loader' on rank 1 (a); load() of actor 'loader' at train.py:20 has waited 12 s"
    )
    assert find_states(made) == {0: RankActivity.WAITS, 1: RankActivity.HOLDS_UP}
    row = show_job(made).splitlines()[4]
    assert row.split() == ["0", "a", "100", "waiting", "12", "s", "load", "of", "loader", "<-", "1", "train.py:20"]


def test_what_a_rank_has_reported_of_a_call_counts() -> None:
    asks = (msgspec.structs.replace(ASK, seconds=4.0, told=NOTICE),)
    assert holdup_of(job(report(0, asks=asks), report(1), report(2))) == (
        "rank 0 waits for actor 'store' on rank 2 (a), which sleeps at store.py:5; "
        "load() of actor 'loader' at train.py:20 has waited 4.0 s"
    )
    stopped = report(2, condition="stopped")
    assert "which is stopped (SIGSTOP" in holdup_of(job(report(0, asks=asks), report(1), stopped))
    deadlock = (msgspec.structs.replace(ASK, told=msgspec.structs.replace(NOTICE, cycle="deadlock: x")),)
    assert holdup_of(job(report(0, asks=deadlock), report(1), report(2))) == "deadlock: x"


def test_a_call_that_is_answered_within_seconds_is_no_wait_nor_is_a_stream() -> None:
    short = msgspec.structs.replace(ASK, seconds=4.0)
    stream = msgspec.structs.replace(ASK, is_stream=True)
    assert describe_holdups(job(report(0, asks=(short, stream)), report(1))) == []


def test_a_collective_is_reported_before_a_call() -> None:
    assert holdup_of(job(report(0, (1,), asks=(ASK,)), report(1))).startswith("rank 0 waits for rank 1 (a)")


def test_what_ranks_have_reported_of_a_culprit_counts() -> None:
    assert holdup_of(job(report(0, (1,), culprit=3), report(1, (3,)), report(3))).startswith(
        "ranks 0, 1 wait for rank 3"
    )


def test_nothing_is_reported_of_ranks_that_are_well() -> None:
    assert describe_holdups(job(report(0), report(1))) == []


def test_what_a_rank_reported_long_ago_counts_no_more() -> None:
    old = msgspec.structs.replace(report(0, (1,)), age=8.0)
    assert holdup_of(job(old, report(1))) == "rank 0 (a) has reported nothing for 8.0 s"


def test_a_rank_that_ended_by_itself_is_no_trouble_but_may_be_waited_for() -> None:
    ended = msgspec.structs.replace(report(1), condition="ended", ending="exited with code 0")
    assert describe_holdups(job(report(0), ended)) == []
    assert holdup_of(job(report(0, (1,)), ended)).startswith("rank 0 waits for rank 1 (a), which exited with code 0;")


def test_ranks_behind_a_circle_are_reported_as_such() -> None:
    text = holdup_of(job(report(0, (1,)), report(1, (0,)), report(2, (1,)), report(3, (2,))))
    assert text.startswith(
        "ranks 0, 1 wait for each other in one operation: the link between them carries nothing, ranks 2, 3 for them; "
    )


@pytest.mark.parametrize(
    "reports",
    [
        [report(0, (2,)), report(1, (2,)), report(2)],
        [report(0, (1,)), report(1, (2,)), report(2)],
        [report(0, (1,)), report(1, (0,)), report(2, (0,))],
        [report(0, (1,)), report(1, (1,))],
        [report(0, asks=(ASK,)), report(1, (0,)), report(2, (1,))],
    ],
)
def test_the_launcher_the_page_and_status_say_the_same(reports: list[RankReport]) -> None:
    made = job(*reports)
    text = holdup_of(made)
    board = WaitBoard()
    for rank, notice in find_waits(made).items():
        board.take(WaitReport(0, rank, notice), 1.0)
    assert board.report(10.0) == [text]
    assert describe_job(made, find_states(made)) == f"{text}."
    assert show_job(made).splitlines()[1] == text


def ended(rank: int, *, seconds: float, call: str = "", blames: int | None = None) -> RankReport:
    ending = f"exited with code 1: {call or blames}"
    return msgspec.structs.replace(
        report(rank), condition="ended", ending=ending, seconds=seconds, call=call, blames=blames
    )


def test_the_rank_with_the_odd_call_is_the_cause_in_any_order_of_ends() -> None:
    odd, usual = ended(1, seconds=1.0, call="gather"), [ended(rank, seconds=3.0, call="reduce") for rank in (0, 2)]
    [sentence] = describe_holdups(job(odd, *usual))
    assert sentence == "rank 1 (a) exited with code 1: gather; ranks 0, 2 have failed because of that"
    two = job(ended(0, seconds=1.0, call="reduce"), ended(1, seconds=2.0, call="gather"))
    assert describe_holdups(two) == ["rank 1 (a) exited with code 1: gather; rank 0 has failed because of that"]
    assert find_odd_calls({0: "reduce", 1: "reduce"}) == []


def test_of_ranks_that_have_lost_each_other_the_lowest_comes_first() -> None:
    found = describe_holdups(job(ended(0, seconds=1.0, blames=1), ended(1, seconds=2.0, blames=0)))
    assert found == ["rank 0 (a) exited with code 1: 1; rank 1 has failed because of that"]
