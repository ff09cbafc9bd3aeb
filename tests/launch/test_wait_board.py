"""The launcher says once what ranks wait for, with what it knows of the culprit, and when they go on."""

from __future__ import annotations

import dataclasses

from asyncpar.core.observe.waits import WaitNotice
from asyncpar.launch.agents.restarted_world import WaitsNotice, decode_notice, encode_notice
from asyncpar.launch.wait_board import COALESCE_SECONDS, WaitBoard, WaitReport


def waiting(rank: int, culprit: int, *, where: str = "", cycle: str = "") -> WaitReport:
    notice = WaitNotice(operation="barrier #1", seconds=10.0, culprit=culprit, host="b", where=where, cycle=cycle)
    return WaitReport(0, rank, notice)


def board(*reports: WaitReport) -> WaitBoard:
    made = WaitBoard()
    for each in reports:
        made.take(each, 1.0)
    return made


def test_news_wait_for_those_of_other_ranks_and_are_reported_once() -> None:
    waits = board(waiting(0, 2, where="sleeps at t.py:1"))
    assert waits.report(1.1) == []
    waits.take(waiting(1, 2), 1.2)
    assert waits.next_deadline == 1.0 + COALESCE_SECONDS
    [line] = waits.report(2.0)
    assert line.startswith("ranks 0, 1 wait for rank 2 (b), which sleeps at t.py:1;")
    waits.take(waiting(3, 2), 2.1)
    assert waits.report(3.0) == []


def test_the_end_is_reported() -> None:
    waits = board(waiting(0, 2), waiting(1, 2))
    waits.report(2.0)
    waits.take(WaitReport(0, 0), 3.0)
    assert waits.report(4.0) == []
    waits.take(WaitReport(0, 1), 5.0)
    assert waits.report(6.0) == ["ranks 0, 1 go on"]
    assert waits.next_deadline is None


def test_ranks_whose_operation_failed_do_not_go_on() -> None:
    waits = board(waiting(0, 2), waiting(1, 2))
    waits.report(2.0)
    for rank in (0, 1):
        waits.take(WaitReport(0, rank, has_failed=True), 3.0)
    assert waits.report(4.0) == []
    waits.take(waiting(0, 2), 5.0)
    assert len(waits.report(6.0)) == 1


def test_what_is_over_before_it_is_reported_is_not_reported() -> None:
    waits = board(waiting(0, 2), WaitReport(0, 0))
    assert waits.report(2.0) == []


def test_agents_know_what_a_stopped_or_blocked_rank_cannot_report() -> None:
    waits = board(waiting(0, 2, where="has not answered for 9.0 s"))
    waits.set_condition(2, "is stopped", 1.0)
    assert "rank 2 (b), which is stopped;" in waits.report(2.0)[0]
    blocked = board(waiting(0, 2), WaitReport(0, 2, None, "t.py:9"))
    assert "rank 2 (b), which blocks its event loop at t.py:9;" in blocked.report(2.0)[0]
    assert blocked.condition(2) == "blocks its event loop at t.py:9"
    blocked.take(WaitReport(0, 2), 3.0)
    assert blocked.condition(2) == ""


def test_a_culprit_that_is_found_stopped_or_blocked_later_is_reported_once_more() -> None:
    waits = board(waiting(0, 2, where="has not answered for 2.2 s"))
    assert "which has not answered" in waits.report(2.0)[0]
    waits.take(WaitReport(0, 2, None, "t.py:9"), 3.0)
    [line] = waits.report(4.0)
    assert line.startswith("rank 0 waits for rank 2 (b), which blocks its event loop at t.py:9;")
    waits.take(WaitReport(0, 2, None, "t.py:10"), 5.0)
    assert waits.report(6.0) == []
    waits.take(WaitReport(0, 0), 7.0)
    assert waits.report(8.0) == ["rank 0 goes on"]


def test_a_rank_that_waited_itself_before_it_was_stopped_is_the_culprit() -> None:
    waits = board(waiting(2, 0), waiting(0, 2))
    waits.set_condition(2, "is stopped", 1.0)
    [line] = waits.report(2.0)
    assert line.startswith("rank 0 waits for rank 2 (b), which is stopped;")


def test_a_rank_that_still_waits_is_not_reported_to_go_on() -> None:
    waits = board(waiting(0, 1))
    waits.report(2.0)
    waits.take(waiting(1, 0), 3.0)
    [line] = waits.report(4.0)
    assert line.startswith("ranks 0, 1 wait for each other in one operation: the link between them carries nothing;")
    waits.set_condition(1, "is stopped", 5.0)
    [line] = waits.report(6.0)
    assert line.startswith("rank 0 waits for rank 1 (b), which is stopped;")


def test_a_deadlock_is_reported_once_also_with_ranks_behind_it() -> None:
    waits = board(waiting(0, 1, cycle="deadlock: x"), waiting(1, 0, cycle="deadlock: x"))
    assert waits.report(2.0) == ["deadlock: x"]
    waits.take(waiting(3, 0, cycle="deadlock: x"), 3.0)
    assert waits.report(4.0) == []


def test_a_rank_that_ended_waits_no_more() -> None:
    waits = board(waiting(0, 2))
    waits.forget(0, 1.1)
    assert waits.report(2.0) == []


def test_a_ranks_report_travels() -> None:
    report = dataclasses.replace(waiting(3, 2, where="sleeps"), blocked="t.py:9")
    for each in (report, WaitReport(1, 2)):
        assert decode_notice(encode_notice(WaitsNotice(each))) == WaitsNotice(each)
