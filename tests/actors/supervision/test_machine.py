"""The supervisor's machine, by conversation."""

from __future__ import annotations

import pytest

from asyncpar.actors.supervision import events
from asyncpar.actors.supervision.events import (
    BackoffElapsed,
    ChildEnded,
    ChildStarted,
    ChildStartFailed,
    ChildStopped,
    FailStart,
    FinishCommand,
    GiveUp,
    RestartRequest,
    StartAll,
    StartCommand,
    StopAll,
    StopCommand,
    StopRequest,
    WaitCommand,
)
from asyncpar.actors.supervision.machine import ChildPhase, PastRestarts, SupervisorMachine
from asyncpar.actors.supervision.policy import Backoff, Intensity, Restart, Strategy
from asyncpar.errors import AsyncparError, UsageError

OOPS = AsyncparError("oops")
PERMANENT, TRANSIENT, TEMPORARY = Restart.PERMANENT, Restart.TRANSIENT, Restart.TEMPORARY


def machine(
    strategy: str = "one_for_one",
    *,
    restarts: int = 10,
    period: float = 5.0,
    backoff: Backoff | None = None,
    draw: float = 0.0,
    **children: Restart,
) -> SupervisorMachine:
    return SupervisorMachine(
        children or dict.fromkeys("abc", PERMANENT),
        strategy=Strategy(strategy),
        intensity=Intensity(restarts=restarts, period=period),
        backoff=backoff or Backoff(),
        draw=lambda: draw,
    )


def running(
    strategy: str = "one_for_one",
    *,
    restarts: int = 10,
    period: float = 5.0,
    backoff: Backoff | None = None,
    draw: float = 0.0,
    **children: Restart,
) -> SupervisorMachine:
    """All children run, since 0.0."""
    supervisor = machine(strategy, restarts=restarts, period=period, backoff=backoff, draw=draw, **children)
    commands = supervisor.handle(StartAll(), now=0.0)
    for child in supervisor.children:
        assert commands == [StartCommand(child)]
        commands = supervisor.handle(ChildStarted(child), now=0.0)
    assert commands == []
    return supervisor


# -- starting ----------------------------------------------------------------------------------------------------------


def test_children_start_in_order_one_at_a_time() -> None:
    supervisor = machine()
    assert supervisor.handle(StartAll(), now=0.0) == [StartCommand("a")]
    assert supervisor.handle(BackoffElapsed(), now=1.0) == []
    assert supervisor.handle(ChildStarted("a"), now=2.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=3.0) == [StartCommand("c")]
    assert supervisor.handle(ChildStarted("c"), now=4.0) == []


def test_nothing_starts_before_its_order() -> None:
    assert machine().handle(BackoffElapsed(), now=0.0) == []


def test_a_child_that_does_not_start_at_first_ends_it_all_in_reverse_order() -> None:
    supervisor = machine()
    supervisor.handle(StartAll(), now=0.0)
    supervisor.handle(ChildStarted("a"), now=0.0)
    supervisor.handle(ChildStarted("b"), now=0.0)
    assert supervisor.handle(ChildStartFailed("c", OOPS), now=0.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=0.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=0.0) == [FailStart("c", OOPS)]
    assert supervisor.is_over


def test_a_temporary_child_that_does_not_start_at_first_ends_it_all_too() -> None:
    supervisor = machine(a=TEMPORARY, b=TEMPORARY)
    supervisor.handle(StartAll(), now=0.0)
    supervisor.handle(ChildStarted("a"), now=0.0)
    assert supervisor.handle(ChildStartFailed("b", OOPS), now=0.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=0.0) == [FailStart("b", OOPS)]


def test_a_child_that_fails_while_later_ones_start_is_restarted_before_them() -> None:
    supervisor = machine()
    supervisor.handle(StartAll(), now=0.0)
    assert supervisor.handle(ChildStarted("a"), now=0.0) == [StartCommand("b")]
    assert supervisor.handle(ChildEnded("a", OOPS), now=0.0) == []
    assert supervisor.handle(ChildStarted("b"), now=0.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStartFailed("a", OOPS), now=0.0) == [
        StartCommand("a")
    ]  # a restart that failed: one more
    assert supervisor.handle(ChildStarted("a"), now=0.0) == [StartCommand("c")]


def test_without_children_there_is_nothing_to_do() -> None:
    supervisor = SupervisorMachine(
        {}, strategy=Strategy.ONE_FOR_ALL, intensity=Intensity(), backoff=Backoff(), draw=lambda: 0.0
    )
    assert supervisor.handle(StartAll(), now=0.0) == []
    assert supervisor.handle(StopAll(), now=0.0) == [FinishCommand()]


# -- who is restarted --------------------------------------------------------------------------------------------------


def test_one_for_one_restarts_only_the_failed_child() -> None:
    supervisor = running("one_for_one")
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=1.0) == []


def test_one_for_all_stops_the_others_in_reverse_order_and_starts_all_in_order() -> None:
    supervisor = running("one_for_all")
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [StopCommand("c")]
    assert supervisor.handle(ChildStopped("c"), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=1.0) == [StartCommand("c")]
    assert supervisor.handle(ChildStarted("c"), now=1.0) == []


def test_rest_for_one_stops_the_later_ones_in_reverse_order_and_starts_from_the_failed_one() -> None:
    supervisor = running("rest_for_one", a=PERMANENT, b=PERMANENT, c=PERMANENT, d=PERMANENT)
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [StopCommand("d")]
    assert supervisor.handle(ChildStopped("d"), now=1.0) == [StopCommand("c")]
    assert supervisor.handle(ChildStopped("c"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=1.0) == [StartCommand("c")]
    assert supervisor.handle(ChildStarted("c"), now=1.0) == [StartCommand("d")]
    assert supervisor.handle(ChildStarted("d"), now=1.0) == []


@pytest.mark.parametrize("failure", [None, OOPS])
def test_a_permanent_child_is_restarted_however_it_ended(failure: AsyncparError | None) -> None:
    assert running(a=PERMANENT).handle(ChildEnded("a", failure), now=1.0) == [StartCommand("a")]


def test_a_transient_child_is_restarted_after_a_failure_only() -> None:
    supervisor = running("one_for_all", a=TRANSIENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("a", None), now=1.0) == []
    assert (supervisor.phase("a"), supervisor.is_wanted("a")) == (ChildPhase.DOWN, False)
    assert running(a=TRANSIENT).handle(ChildEnded("a", OOPS), now=1.0) == [StartCommand("a")]


@pytest.mark.parametrize("failure", [None, OOPS])
def test_a_temporary_child_is_never_restarted_and_is_forgotten(failure: AsyncparError | None) -> None:
    supervisor = running("one_for_all", a=TEMPORARY, b=PERMANENT)
    assert supervisor.handle(ChildEnded("a", failure), now=1.0) == []
    assert supervisor.children == ("b",)
    assert supervisor.handle(StopAll(), now=1.0) == [StopCommand("b")]


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
def test_temporary_siblings_that_were_stopped_are_not_restarted(strategy: str) -> None:
    supervisor = running(strategy, a=PERMANENT, b=TEMPORARY, c=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StopCommand("c")]
    assert supervisor.handle(ChildStopped("c"), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("c")]
    assert supervisor.children == ("a", "c")


def test_a_restart_of_the_group_starts_those_too_that_had_ended_in_order() -> None:
    supervisor = running("one_for_all", a=PERMANENT, b=TRANSIENT)
    supervisor.handle(ChildEnded("b", None), now=1.0)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]


# -- failures in the middle --------------------------------------------------------------------------------------------


def test_a_sibling_that_fails_before_it_was_stopped_counts_as_stopped() -> None:
    supervisor = running("one_for_all", restarts=1)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StopCommand("c")]
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == []
    assert supervisor.handle(ChildStopped("c"), now=1.0) == [StartCommand("a")]


def test_a_failure_of_the_child_that_is_being_stopped_is_no_news() -> None:
    supervisor = running("one_for_all", restarts=1, a=PERMANENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == []
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == []


def test_a_child_that_fails_while_its_group_starts_has_the_others_stopped_again() -> None:
    supervisor = running("one_for_all")
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    supervisor.handle(ChildStopped("c"), now=1.0)
    supervisor.handle(ChildStopped("b"), now=1.0)
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == []  # b must have answered first
    assert supervisor.handle(ChildStarted("b"), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [StartCommand("a")]


def test_a_start_that_fails_when_its_group_is_to_stop_anyway_counts_as_stopped() -> None:
    supervisor = running("one_for_all", restarts=2, a=PERMANENT, b=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    supervisor.handle(ChildStopped("b"), now=1.0)
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    assert supervisor.handle(ChildStartFailed("b", OOPS), now=1.0) == [StartCommand("a")]


def test_an_earlier_child_that_fails_while_the_rest_stops_is_restarted_first() -> None:
    supervisor = running("rest_for_one")
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [StopCommand("c")]
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == []
    assert supervisor.handle(ChildStopped("c"), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=1.0) == [StartCommand("c")]


def test_a_restart_that_fails_is_tried_again_from_that_child_on() -> None:
    supervisor = running("rest_for_one")
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    supervisor.handle(ChildStopped("c"), now=1.0)
    supervisor.handle(ChildStopped("b"), now=1.0)
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStartFailed("b", OOPS), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=1.0) == [StartCommand("c")]


def test_a_restart_of_all_that_fails_in_the_middle_begins_anew() -> None:
    supervisor = running("one_for_all", a=PERMANENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStartFailed("b", OOPS), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.0) == [StartCommand("a")]


def test_the_end_of_a_child_that_nobody_knows_is_no_news() -> None:
    assert running().handle(ChildEnded("nobody", OOPS), now=1.0) == []


# -- intensity ---------------------------------------------------------------------------------------------------------


def test_more_restarts_than_allowed_stop_all_in_reverse_order_and_give_up_once() -> None:
    supervisor = running(restarts=2, period=5.0)
    for now in (1.0, 2.0):
        assert supervisor.handle(ChildEnded("b", OOPS), now=now) == [StartCommand("b")]
        assert supervisor.handle(ChildStarted("b"), now=now) == []
    assert supervisor.handle(ChildEnded("b", OOPS), now=3.0) == [StopCommand("c")]
    assert supervisor.handle(ChildEnded("a", OOPS), now=3.0) == []
    assert supervisor.handle(ChildStopped("c"), now=3.0) == [GiveUp("b", 2, OOPS)]
    for event in (ChildEnded("a", OOPS), BackoffElapsed(), StopAll(), StartAll()):
        assert supervisor.handle(event, now=9.0) == []


def test_restarts_of_different_children_count_together() -> None:
    supervisor = running(restarts=1, a=PERMANENT, b=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    supervisor.handle(ChildStarted("a"), now=1.0)
    assert supervisor.handle(ChildEnded("b", None), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.0) == [GiveUp("b", 1, None)]


def test_restarts_longer_ago_than_the_period_do_not_count() -> None:
    supervisor = running(restarts=1, period=5.0, a=PERMANENT)
    for now in (1.0, 6.5, 12.0):
        assert supervisor.handle(ChildEnded("a", OOPS), now=now) == [StartCommand("a")]
        supervisor.handle(ChildStarted("a"), now=now)
    assert supervisor.handle(ChildEnded("a", OOPS), now=17.0) == [GiveUp("a", 1, OOPS)]


def test_a_restart_of_a_group_counts_once() -> None:
    supervisor = running("one_for_all", restarts=1)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    supervisor.handle(ChildStopped("c"), now=1.0)
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StartCommand("b")]


def test_a_restart_that_fails_counts() -> None:
    supervisor = running(restarts=2, a=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStartFailed("a", OOPS), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStartFailed("a", OOPS), now=1.0) == [GiveUp("a", 2, OOPS)]


def test_an_intensity_of_none_gives_up_at_the_first_failure() -> None:
    assert running(restarts=0, a=PERMANENT).handle(ChildEnded("a", OOPS), now=1.0) == [GiveUp("a", 0, OOPS)]


def test_giving_up_waits_for_the_child_that_is_being_started() -> None:
    supervisor = running(restarts=1, a=PERMANENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StartCommand("a")]
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == []
    assert supervisor.handle(ChildStarted("a"), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.0) == [GiveUp("b", 1, OOPS)]


# -- back-off ----------------------------------------------------------------------------------------------------------


def test_the_delay_grows_with_failures_in_a_row() -> None:
    supervisor = running(backoff=Backoff(initial=1.0, factor=2.0), a=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [WaitCommand(2.0)]
    assert supervisor.handle(BackoffElapsed(), now=2.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStartFailed("a", OOPS), now=2.0) == [WaitCommand(4.0)]
    assert supervisor.handle(BackoffElapsed(), now=4.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=4.0) == []
    assert supervisor.handle(ChildEnded("a", OOPS), now=5.0) == [WaitCommand(9.0)]


def test_a_child_that_lived_for_a_while_starts_over() -> None:
    supervisor = running(backoff=Backoff(initial=1.0, reset_after=30.0), a=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    supervisor.handle(BackoffElapsed(), now=2.0)
    supervisor.handle(ChildStarted("a"), now=2.0)
    assert supervisor.handle(ChildEnded("a", OOPS), now=32.0) == [WaitCommand(33.0)]


def test_chance_shortens_the_delay_by_the_jitter() -> None:
    supervisor = running(backoff=Backoff(initial=4.0, jitter=0.5), draw=0.5, a=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [WaitCommand(4.0)]


def test_a_tick_too_early_waits_again() -> None:
    supervisor = running(backoff=Backoff(initial=1.0), a=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    assert supervisor.handle(BackoffElapsed(), now=1.5) == [WaitCommand(2.0)]


def test_siblings_are_stopped_before_the_wait_and_not_after_it() -> None:
    supervisor = running("one_for_all", backoff=Backoff(initial=1.0), a=PERMANENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.2) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=1.3) == [WaitCommand(2.0)]


def test_later_children_wait_for_an_earlier_one_that_waits() -> None:
    supervisor = running("rest_for_one", backoff=Backoff(initial=1.0), a=PERMANENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("a", OOPS), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [WaitCommand(2.0)]
    assert supervisor.handle(BackoffElapsed(), now=2.0) == [StartCommand("a")]
    assert supervisor.handle(ChildStarted("a"), now=2.0) == [StartCommand("b")]


def test_one_for_one_children_wait_on_their_own() -> None:
    supervisor = running(backoff=Backoff(initial=4.0, factor=1.0), a=PERMANENT, b=PERMANENT)
    assert supervisor.handle(ChildEnded("b", OOPS), now=1.0) == [WaitCommand(5.0)]
    assert supervisor.handle(ChildEnded("a", OOPS), now=2.0) == []
    assert supervisor.handle(BackoffElapsed(), now=5.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=5.0) == [WaitCommand(6.0)]
    assert supervisor.handle(BackoffElapsed(), now=6.0) == [StartCommand("a")]


def test_stopping_all_during_a_wait_starts_nothing() -> None:
    supervisor = running(backoff=Backoff(initial=1.0), a=PERMANENT, b=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    assert supervisor.handle(StopAll(), now=1.5) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=3.0) == [FinishCommand()]
    assert supervisor.handle(BackoffElapsed(), now=4.0) == []


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_all_are_stopped_in_reverse_order() -> None:
    supervisor = running()
    assert supervisor.handle(StopAll(), now=1.0) == [StopCommand("c")]
    assert supervisor.handle(ChildStopped("c"), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=1.0) == [FinishCommand()]


def test_a_child_that_was_just_being_started_is_stopped_too() -> None:
    supervisor = machine(a=PERMANENT, b=PERMANENT)
    supervisor.handle(StartAll(), now=0.0)
    supervisor.handle(ChildStarted("a"), now=0.0)
    assert supervisor.handle(StopAll(), now=0.0) == []
    assert supervisor.handle(ChildStarted("b"), now=0.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=0.0) == [StopCommand("a")]
    assert supervisor.handle(ChildStopped("a"), now=0.0) == [FinishCommand()]


def test_the_first_reason_to_end_is_the_one_that_is_reported() -> None:
    stops = running(restarts=0, a=PERMANENT, b=PERMANENT)
    assert stops.handle(StopAll(), now=1.0) == [StopCommand("b")]
    assert stops.handle(ChildEnded("a", OOPS), now=1.0) == []
    assert stops.handle(ChildStopped("b"), now=1.0) == [FinishCommand()]
    fails = running(restarts=0, a=PERMANENT, b=PERMANENT)
    assert fails.handle(ChildEnded("a", OOPS), now=1.0) == [StopCommand("b")]
    assert fails.handle(StopAll(), now=1.0) == []
    assert fails.handle(ChildStopped("b"), now=1.0) == [GiveUp("a", 0, OOPS)]


def test_a_child_that_was_stopped_by_hand_stays_down() -> None:
    supervisor = running("one_for_all")
    assert supervisor.handle(StopRequest("b"), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=1.0) == []
    assert supervisor.handle(BackoffElapsed(), now=9.0) == []
    assert supervisor.handle(RestartRequest("b"), now=9.0) == [StartCommand("b")]


def test_a_temporary_child_that_was_stopped_by_hand_is_forgotten() -> None:
    supervisor = running(a=TEMPORARY)
    supervisor.handle(StopRequest("a"), now=1.0)
    supervisor.handle(ChildStopped("a"), now=1.0)
    with pytest.raises(UsageError, match=r"child: expected the name of a child \(none\), got 'a'"):
        supervisor.handle(RestartRequest("a"), now=1.0)


def test_stopping_a_child_by_hand_calls_off_its_restart() -> None:
    supervisor = running(backoff=Backoff(initial=1.0), a=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    assert supervisor.handle(StopRequest("a"), now=1.5) == []
    assert supervisor.handle(BackoffElapsed(), now=2.0) == []


def test_restarting_a_child_by_hand_stops_it_first_and_does_not_count() -> None:
    supervisor = running("one_for_all", restarts=0)
    assert supervisor.handle(RestartRequest("b"), now=1.0) == [StopCommand("b")]
    assert supervisor.handle(ChildStopped("b"), now=1.0) == [StartCommand("b")]
    assert supervisor.handle(ChildStarted("b"), now=1.0) == []


def test_restarting_a_child_by_hand_ends_its_wait() -> None:
    supervisor = running(backoff=Backoff(initial=1.0), a=PERMANENT)
    supervisor.handle(ChildEnded("a", OOPS), now=1.0)
    assert supervisor.handle(RestartRequest("a"), now=1.5) == [StartCommand("a")]


def test_a_stopped_child_that_cannot_be_started_by_hand_stays_down() -> None:
    supervisor = running(a=PERMANENT)
    supervisor.handle(StopRequest("a"), now=1.0)
    supervisor.handle(ChildStopped("a"), now=1.0)
    supervisor.handle(RestartRequest("a"), now=1.0)
    assert supervisor.handle(ChildStartFailed("a", OOPS), now=1.0) == []
    assert not supervisor.is_wanted("a")


def test_a_running_child_that_cannot_be_restarted_by_hand_is_tried_again() -> None:
    supervisor = running(a=PERMANENT)
    supervisor.handle(RestartRequest("a"), now=1.0)
    supervisor.handle(ChildStopped("a"), now=1.0)
    assert supervisor.handle(ChildStartFailed("a", OOPS), now=1.0) == [StartCommand("a")]


def test_a_running_temporary_child_cannot_be_restarted_by_hand() -> None:
    with pytest.raises(UsageError, match=r"child: 'a' is temporary, and such children are never restarted"):
        running(a=TEMPORARY).handle(RestartRequest("a"), now=1.0)


def test_a_child_cannot_be_restarted_by_hand_once_all_stops() -> None:
    supervisor = running()
    supervisor.handle(StopAll(), now=1.0)
    with pytest.raises(UsageError, match=r"child: 'a' cannot be restarted: its supervisor is about to end"):
        supervisor.handle(RestartRequest("a"), now=1.0)


def test_an_unknown_child_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"child: expected the name of a child \('a', 'b', 'c'\), got 'd'"):
        running().handle(StopRequest("d"), now=1.0)


def test_restarts_before_the_machine_was_made_count() -> None:
    intensity = Intensity(restarts=2, period=10.0)

    def make(past: PastRestarts | None) -> SupervisorMachine:
        machine = SupervisorMachine(
            {"a": Restart.PERMANENT},
            strategy=Strategy.ONE_FOR_ONE,
            intensity=intensity,
            backoff=Backoff(initial=1.0),
            draw=lambda: 0.0,
            past=past,
        )
        machine.handle(events.StartAll(), now=0.0)
        machine.handle(events.ChildStarted("a"), now=0.0)
        return machine

    first = make(None)
    assert first.handle(events.ChildEnded("a", ValueError()), now=1.0) == [events.WaitCommand(2.0)]
    second = make(first.past)
    assert second.handle(events.ChildEnded("a", ValueError()), now=3.0) == [events.WaitCommand(5.0)], "back-off grows"
    third = make(second.past)
    (command,) = third.handle(events.ChildEnded("a", ValueError()), now=6.0)
    assert isinstance(command, events.GiveUp)
    later = make(second.past)
    assert isinstance(later.handle(events.ChildEnded("a", ValueError()), now=60.0)[0], events.WaitCommand)
