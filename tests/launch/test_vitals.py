"""In which condition a rank is, and when one that does not run is given up: by conversation."""

from __future__ import annotations

import math

import pytest

from asyncpar.core.observe.rank_reports import Phase
from asyncpar.launch.vitals import (
    FORMING_SECONDS,
    HUNG_SECONDS,
    LOOK_SECONDS,
    Condition,
    ProcessSample,
    RankState,
    SilenceLimits,
    SilentRanks,
    Vitals,
)

RUNS = ProcessSample()
STOPPED = ProcessSample(is_stopped=True)


def look(
    vitals: Vitals,
    seconds: float,
    *,
    start: float = 0.0,
    share: float = 0.0,
    is_uninterruptible: bool = False,
    beats: bool = False,
) -> float:
    """Look as often as an agent does at a process that uses this ``share`` of a core."""
    now = start
    while now < start + seconds - LOOK_SECONDS / 2:
        now += LOOK_SECONDS
        if beats:
            vitals.beat()
        vitals.update(ProcessSample(is_uninterruptible=is_uninterruptible, cpu=share * now), now=now)
    return now


def condition(vitals: Vitals) -> Condition:
    return vitals.condition


def member() -> Vitals:
    vitals = Vitals()
    vitals.enter(Phase.MEMBER)
    return vitals


def test_a_stopped_process_is_reported_at_the_next_inspection_and_only_then() -> None:
    vitals = Vitals()
    assert not vitals.update(RUNS, now=0.0)
    assert vitals.update(STOPPED, now=LOOK_SECONDS)
    assert (vitals.condition, vitals.seconds) == (Condition.STOPPED, LOOK_SECONDS)
    assert not vitals.update(STOPPED, now=2 * LOOK_SECONDS)
    assert vitals.update(RUNS, now=3 * LOOK_SECONDS)
    assert condition(vitals) is Condition.WELL


def test_a_member_that_gives_no_beat_is_hung_and_one_that_does_is_not() -> None:
    vitals = member()
    now = look(vitals, 100.0, beats=True)
    assert condition(vitals) is Condition.WELL
    now = look(vitals, HUNG_SECONDS, start=now)
    assert condition(vitals) is Condition.HUNG
    vitals.beat()
    assert vitals.update(RUNS, now=now + LOOK_SECONDS)
    assert condition(vitals) is Condition.WELL


def test_a_silent_rank_that_uses_the_processor_computes_and_one_that_only_waits_for_its_lock_does_not() -> None:
    computing, waiting = member(), member()
    look(computing, 2 * HUNG_SECONDS, share=0.9)
    look(waiting, 2 * HUNG_SECONDS, share=0.03)
    assert (computing.condition, waiting.condition) == (Condition.BUSY, Condition.HUNG)


def test_time_in_which_a_rank_computed_does_not_count_as_that_in_which_it_hung() -> None:
    vitals = member()
    now = look(vitals, 100.0, share=1.0)
    assert condition(vitals) is Condition.BUSY
    assert vitals.seconds == pytest.approx(100.0, abs=1.0)
    now = look(vitals, 10.0, start=now, share=0.0)  # its clock of processor time stands still, or goes back
    assert condition(vitals) is Condition.HUNG
    assert vitals.seconds == pytest.approx(10.0)


def test_a_rank_that_the_kernel_does_not_let_go_is_no_hung_one() -> None:
    vitals = member()
    look(vitals, 2 * HUNG_SECONDS, is_uninterruptible=True)
    assert condition(vitals) is Condition.UNINTERRUPTIBLE
    reading = member()
    look(reading, 2 * HUNG_SECONDS, is_uninterruptible=True, share=0.3)
    assert reading.condition is Condition.BUSY, "a disk that answers"


def test_programs_that_never_join_and_those_that_have_left_need_not_beat() -> None:
    vitals = Vitals()
    now = look(vitals, 1000.0)
    vitals.enter(Phase.MEMBER)
    vitals.enter(Phase.LEFT)
    look(vitals, 1000.0, start=now)
    assert condition(vitals) is Condition.WELL


def test_time_in_which_the_agent_did_not_run_counts_for_nothing() -> None:
    """A suspended machine, a launcher that was stopped itself."""
    vitals = Vitals()
    vitals.enter(Phase.MEMBER)
    vitals.update(RUNS, now=0.0)
    assert not vitals.update(RUNS, now=3600.0)
    assert condition(vitals) is Condition.WELL


def stopped(rank: int, phase: Phase | None = Phase.MEMBER, seconds: float = 0.0) -> RankState:
    return RankState(generation=0, rank=rank, phase=phase, condition=Condition.STOPPED, seconds=seconds)


def test_a_silent_rank_is_given_up_after_the_limit() -> None:
    ranks = SilentRanks(SilenceLimits(silent=30.0))
    ranks.take(stopped(2, seconds=0.5), now=10.0)
    assert ranks.next_deadline == 39.5
    assert ranks.expired(39.4) == []
    assert ranks.expired(40.0) == [(2, "was stopped for 30.5 s")]


LIMITS = [
    # silent, stopped, busy: for a rank that is stopped, hung, in the kernel, busy
    ((None, None, None), (None, None, None, None)),
    ((30.0, None, None), (30.0, 30.0, 30.0, None)),
    ((30.0, 5.0, None), (5.0, 30.0, 30.0, None)),
    ((4.0, 5.0, None), (4.0, 4.0, 4.0, None)),
    ((None, 5.0, None), (5.0, None, None, None)),
    ((math.inf, 5.0, 9.0), (5.0, None, None, 9.0)),
]


@pytest.mark.parametrize(("limits", "expected"), LIMITS)
def test_each_condition_has_the_limit_that_was_given_for_it_and_none_by_default(
    limits: tuple[float | None, ...], expected: tuple[float | None, ...]
) -> None:
    silent, stopped_after, busy = limits
    conditions = (Condition.STOPPED, Condition.HUNG, Condition.UNINTERRUPTIBLE, Condition.BUSY)
    for condition, limit in zip(conditions, expected, strict=True):
        given = SilenceLimits(silent=silent, stopped=stopped_after, busy=busy)
        ranks = SilentRanks(given)
        ranks.take(RankState(generation=0, rank=2, phase=Phase.MEMBER, condition=condition), now=1.0)
        assert ranks.next_deadline == (None if limit is None else 1.0 + limit)
        gone = ranks.expired(1e9)
        assert [rank for rank, _ in gone] == ([] if limit is None else [2])
        words = given.explain(condition)
        assert ("would end the job" in words) == (limit is None)
        assert limit is None or f"after {limit:g} s" in words


def test_a_rank_that_goes_on_is_not_given_up() -> None:
    ranks = SilentRanks(SilenceLimits(silent=30.0))
    ranks.take(stopped(2), now=0.0)
    ranks.take(RankState(generation=0, rank=2, phase=Phase.MEMBER), now=20.0)
    assert ranks.next_deadline is None


def test_without_a_limit_nobody_is_given_up() -> None:
    ranks = SilentRanks(SilenceLimits())
    ranks.take(stopped(2), now=0.0)
    assert ranks.next_deadline is None
    assert ranks.expired(1e9) == []


def test_a_rank_stopped_on_its_way_in_is_given_up_soon_if_others_wait_there() -> None:
    ranks = SilentRanks(SilenceLimits(silent=30.0))
    ranks.take(stopped(0, phase=None), now=0.0)
    assert ranks.next_deadline == 30.0  # a program that may never join
    ranks.take(RankState(generation=0, rank=1, phase=Phase.FORMING), now=1.0)
    assert ranks.next_deadline == FORMING_SECONDS
    ranks.take(RankState(generation=0, rank=1, phase=Phase.MEMBER), now=2.0)
    assert ranks.next_deadline == 30.0


def test_a_rank_whose_process_is_gone_is_forgotten() -> None:
    ranks = SilentRanks(SilenceLimits(silent=30.0))
    ranks.take(stopped(0), now=0.0)
    ranks.forget(0)
    assert ranks.next_deadline is None
