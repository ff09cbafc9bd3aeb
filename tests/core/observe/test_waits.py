"""Waits become sentences: culprits, cycles, many ranks in one."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asyncpar.core.observe.rank_observer import RankObserver, parse_wait_warning
from asyncpar.core.observe.reporting import Reporter
from asyncpar.core.observe.waits import (
    JOINING,
    WaitEdge,
    WaitNotice,
    describe_cycle,
    find_cycle,
    spell_ranks,
    spell_seconds,
    sum_up,
)
from asyncpar.errors import UsageError
from asyncpar.testing.loop import run_virtual


def wait(rank: int, awaited: int, number: int = 0) -> WaitEdge:
    return WaitEdge(rank, awaited, f"recv from rank {awaited}", (1, number), f"train.py:{rank + 10}")


def notice(culprit: int | None, *, where: str = "", cycle: str = "") -> WaitNotice:
    return WaitNotice(
        operation="all_reduce #4", seconds=10.0, site="t.py:7", culprit=culprit, host="b", where=where, cycle=cycle
    )


def test_a_notice_is_a_sentence() -> None:
    text = "all_reduce #4 (called at t.py:7) has waited 10 s for rank 2 (b), which is in user code at train.py:57"
    assert str(notice(2, where="is in user code at train.py:57")) == text
    assert str(notice(None)).endswith("has waited 10 s for any rank")


def test_a_cycle_is_found_from_each_of_its_ranks_and_reported_alike() -> None:
    waits = [wait(0, 1, 1), wait(1, 2, 2), wait(2, 0, 3), wait(3, 0, 4)]
    texts = {describe_cycle(find_cycle(waits, rank)) for rank in (0, 1, 2)}
    assert texts == {
        "deadlock: rank 0 waits for rank 1 in recv from rank 1 at train.py:10, "
        "rank 1 waits for rank 2 in recv from rank 2 at train.py:11, "
        "rank 2 waits for rank 0 in recv from rank 0 at train.py:12"
    }
    assert find_cycle(waits, 3) == []  # it waits for the cycle, and is no part of it


def test_ranks_in_one_operation_are_no_deadlock() -> None:
    assert find_cycle([wait(0, 1), wait(1, 0)], 0) == []


def test_a_long_cycle_is_short() -> None:
    size = 1000
    text = describe_cycle([wait(rank, (rank + 1) % size, rank) for rank in range(size)])
    assert text.startswith("deadlock of 1000 ranks, each waits for the next: 0 -> 1 -> 2")
    assert len(text) <= 300


def test_ranks_that_wait_for_one_are_summed_up() -> None:
    notices = {rank: notice(2, where="sleeps at train.py:5") for rank in (0, 1, 3)}
    assert sum_up(notices) == [
        "ranks 0, 1, 3 wait for rank 2 (b), which sleeps at train.py:5; all_reduce #4 at t.py:7 has waited 10 s"
    ]


def test_a_rank_that_waits_itself_is_not_the_culprit() -> None:
    [text] = sum_up({0: notice(1), 1: notice(2, where="sleeps"), 3: notice(1)})
    assert text.startswith("ranks 0, 1, 3 wait for rank 2 (b), which sleeps;")


def test_a_deadlock_is_reported_once() -> None:
    assert sum_up({rank: notice(1 - rank, cycle="deadlock: x") for rank in (0, 1)}) == ["deadlock: x"]


def test_ranks_that_wait_for_each_other_are_one_sentence() -> None:
    circle = {0: notice(1), 1: notice(0), 4: notice(1)}
    assert sum_up(circle) == [
        "ranks 0, 1 wait for each other in one operation: the link between them carries nothing, rank 4 for them; "
        "all_reduce #4 at t.py:7 has waited 10 s"
    ]
    [text] = sum_up({0: notice(0)})
    assert text.startswith("rank 0 waits for rank 0 (b);")


def test_the_rank_that_most_wait_for_comes_first() -> None:
    first, second = sum_up({0: notice(5), 1: notice(6), 2: notice(6)})
    assert first.startswith("ranks 1, 2 wait for rank 6")
    assert second.startswith("rank 0 waits for rank 5")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.31, "0.3 s"),
        (9.97, "10 s"),
        (12.2, "12 s"),
        (99.7, "1 min 40 s"),
        (184.0, "3 min 4 s"),
        (7500.0, "2 h 5 min"),
    ],
)
def test_times_are_spelled(seconds: float, text: str) -> None:
    assert spell_seconds(seconds) == text


def test_ranks_are_spelled_in_runs() -> None:
    assert spell_ranks([0, 2, 3, 4, 7, 8]) == "0, 2-4, 7, 8"


def test_an_observer_reports_the_wait_that_began_first() -> None:
    reported: list[tuple[WaitNotice | None, bool]] = []

    class Recording(Reporter):
        def waiting(self, notice: WaitNotice | None, *, has_failed: bool = False) -> None:
            reported.append((notice, has_failed))

    observer = RankObserver(0)
    observer.reporter = Recording(None)
    one, two = notice(1), notice(2)
    observer.report_waiting("a", one)
    observer.report_waiting("b", two)
    observer.report_over("a", has_failed=False)
    observer.report_over("b", has_failed=True)
    observer.report_over("b", has_failed=True)
    assert reported == [(one, False), (one, False), (two, False), (None, True)]


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 10.0), ("", 10.0), ("off", None), ("0.5", 0.5), ("86400", 86400.0)]
)
def test_the_threshold_is_settable(text: str | None, seconds: float | None) -> None:
    assert parse_wait_warning(text) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "86401"])
def test_other_thresholds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"ASYNCPAR_WAIT_WARNING: expected seconds from 0\.1"):
        parse_wait_warning(text)


def test_an_actor_that_holds_things_up_is_named_with_its_rank() -> None:
    reported = WaitNotice(operation="go() of actor 'a'", seconds=10.0, culprit=1, host="b", where="sleeps", actor="a")
    assert str(reported) == "go() of actor 'a' has waited 10 s for actor 'a' on rank 1 (b), which sleeps"
    assert sum_up({0: reported}) == [
        "rank 0 waits for actor 'a' on rank 1 (b), which sleeps; go() of actor 'a' has waited 10 s"
    ]


def test_the_program_of_a_rank_does_not_explain_its_actor() -> None:
    reported = WaitNotice(operation="go() of actor 'a'", seconds=10.0, culprit=1, host="b", where="sleeps", actor="a")
    [behind] = sum_up({0: reported, 1: notice(0), 2: notice(1)})
    assert behind.startswith("ranks 0-2 wait for actor 'a' on rank 1 (b), which sleeps; go() of actor 'a' has waited")
    for_actor, for_rank = sum_up({0: reported, 2: notice(1)})
    assert for_actor.startswith("rank 0 waits for actor 'a' on rank 1 (b)")
    assert for_rank.startswith("rank 2 waits for rank 1 (b)")


def test_a_collective_is_reported_before_an_ask_that_waits_for_longer() -> None:
    reported: list[WaitNotice | None] = []

    class Recording(Reporter):
        def waiting(self, notice: WaitNotice | None, *, has_failed: bool = False) -> None:
            reported.append(notice)

    observer = RankObserver(0)
    observer.reporter = Recording(None)
    ask, collective = WaitNotice(operation="go()", seconds=10.0, culprit=1, actor="a"), notice(2)
    observer.report_waiting("ask", ask)
    observer.report_waiting("collective", collective)
    assert reported == [ask, collective]


@pytest.mark.parametrize("seconds", [1.0, 12.0])
def test_what_takes_long_is_reported_once_and_when_it_is_over(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with RankObserver(3).reporting(lambda after: WaitNotice(operation=JOINING, seconds=after, where="the others")):
            await asyncio.sleep(seconds)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    texts = [f"rank 3: {JOINING} has waited 10 s for the others", f"rank 3: {JOINING} goes on"]
    assert [record.getMessage() for record in caplog.records] == (texts if seconds > 10.0 else [])
