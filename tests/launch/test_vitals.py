"""In which condition a rank is, and when one that does not run is given up: by conversation."""

from __future__ import annotations

import pytest

from asyncpar.core.observe.reporting import Phase
from asyncpar.launch.vitals import (
    FORMING_SECONDS,
    HUNG_SECONDS,
    LOOK_SECONDS,
    Condition,
    RankState,
    SilentRanks,
    Vitals,
)


def look(vitals: Vitals, seconds: float, *, start: float = 0.0, is_stopped: bool = False, beats: bool = False) -> float:
    """Look as often as an agent does."""
    now = start
    while now < start + seconds:
        now += LOOK_SECONDS
        if beats:
            vitals.beat()
        vitals.look(is_stopped=is_stopped, now=now)
    return now


def condition(vitals: Vitals) -> Condition:
    return vitals.condition


def test_a_stopped_process_is_told_at_the_next_look_and_only_then() -> None:
    vitals = Vitals()
    assert not vitals.look(is_stopped=False, now=0.0)
    assert vitals.look(is_stopped=True, now=LOOK_SECONDS)
    assert (vitals.condition, vitals.seconds) == (Condition.STOPPED, LOOK_SECONDS)
    assert not vitals.look(is_stopped=True, now=2 * LOOK_SECONDS)
    assert vitals.look(is_stopped=False, now=3 * LOOK_SECONDS)
    assert vitals.condition is Condition.WELL


def test_a_member_that_gives_no_beat_is_hung_and_one_that_does_is_not() -> None:
    vitals = Vitals()
    vitals.enter(Phase.MEMBER)
    now = look(vitals, 100.0, beats=True)
    assert condition(vitals) is Condition.WELL
    now = look(vitals, HUNG_SECONDS, start=now)
    assert condition(vitals) is Condition.HUNG
    vitals.beat()
    assert vitals.look(is_stopped=False, now=now + LOOK_SECONDS)


def test_programs_that_never_join_and_those_that_have_left_need_not_beat() -> None:
    vitals = Vitals()
    now = look(vitals, 1000.0)
    vitals.enter(Phase.MEMBER)
    vitals.enter(Phase.LEFT)
    look(vitals, 1000.0, start=now)
    assert vitals.condition is Condition.WELL


def test_time_in_which_the_agent_did_not_run_counts_for_nothing() -> None:
    """A suspended machine, a launcher that was stopped itself."""
    vitals = Vitals()
    vitals.enter(Phase.MEMBER)
    vitals.look(is_stopped=False, now=0.0)
    assert not vitals.look(is_stopped=False, now=3600.0)
    assert vitals.condition is Condition.WELL


def stopped(rank: int, phase: Phase | None = Phase.MEMBER, seconds: float = 0.0) -> RankState:
    return RankState(generation=0, rank=rank, phase=phase, condition=Condition.STOPPED, seconds=seconds)


def test_a_silent_rank_is_given_up_after_the_limit() -> None:
    ranks = SilentRanks(30.0)
    ranks.take(stopped(2, seconds=0.5), now=10.0)
    assert ranks.next_deadline == 39.5
    assert ranks.expired(39.4) == []
    assert ranks.expired(40.0) == [(2, "was stopped for 30.5 s")]


@pytest.mark.parametrize(("limit", "stopped_limit", "expected"), [(30.0, 5.0, 5.0), (None, 5.0, 5.0), (4.0, 5.0, 4.0)])
def test_a_stopped_rank_has_a_limit_of_its_own(limit: float | None, stopped_limit: float, expected: float) -> None:
    ranks = SilentRanks(limit, stopped_limit)
    ranks.take(stopped(2), now=0.0)
    assert ranks.next_deadline == expected
    assert ranks.expired(expected) == [(2, f"was stopped for {expected} s")]
    hung = RankState(generation=0, rank=2, phase=Phase.MEMBER, condition=Condition.HUNG, seconds=0.0)
    ranks.take(hung, now=1.0)
    assert ranks.next_deadline == (None if limit is None else 1.0 + limit)


def test_a_rank_that_goes_on_is_not_given_up() -> None:
    ranks = SilentRanks(30.0)
    ranks.take(stopped(2), now=0.0)
    ranks.take(RankState(generation=0, rank=2, phase=Phase.MEMBER), now=20.0)
    assert ranks.next_deadline is None


def test_without_a_limit_nobody_is_given_up() -> None:
    ranks = SilentRanks(None)
    ranks.take(stopped(2), now=0.0)
    assert ranks.next_deadline is None
    assert ranks.expired(1e9) == []


def test_a_rank_stopped_on_its_way_in_is_given_up_soon_if_others_wait_there() -> None:
    ranks = SilentRanks(30.0)
    ranks.take(stopped(0, phase=None), now=0.0)
    assert ranks.next_deadline == 30.0  # a program that may never join
    ranks.take(RankState(generation=0, rank=1, phase=Phase.FORMING), now=1.0)
    assert ranks.next_deadline == FORMING_SECONDS
    ranks.take(RankState(generation=0, rank=1, phase=Phase.MEMBER), now=2.0)
    assert ranks.next_deadline == 30.0


def test_a_rank_whose_process_is_gone_is_forgotten() -> None:
    ranks = SilentRanks(30.0)
    ranks.take(stopped(0), now=0.0)
    ranks.forget(0)
    assert ranks.next_deadline is None
