"""Decisions about the places of a job."""

from __future__ import annotations

from asyncpar.engines.interface import BeginRanks, Interrupt, Kill, PlaceLost, PlaceReport, PlaceServes
from asyncpar.engines.machine import (
    LOST_SECONDS,
    MARGIN_SECONDS,
    CallerInterrupted,
    PlaceReported,
    PlacesMachine,
    PlaceTick,
    SendToPlace,
)

GOOD = PlaceReport(values={0: b"v"})
BAD = PlaceReport(exit_code=1)


def test_places_begin_when_the_first_serves() -> None:
    machine = PlacesMachine(3, grace=5.0)
    commands = machine.handle(PlaceServes("host:1"), now=0.0)
    assert commands == [SendToPlace(1, BeginRanks("host:1")), SendToPlace(2, BeginRanks("host:1"))]
    assert machine.next_deadline is None


def test_a_job_is_over_when_all_places_have_reported() -> None:
    machine = PlacesMachine(2, grace=5.0)
    machine.handle(PlaceReported(1, GOOD), now=0.0)
    assert not machine.is_over
    assert machine.next_deadline is None
    machine.handle(PlaceReported(0, GOOD), now=1.0)
    assert machine.is_over


def test_after_a_loss_the_others_are_killed_soon() -> None:
    machine = PlacesMachine(3, grace=60.0)
    assert machine.handle(PlaceLost(1, "died"), now=10.0) == []
    assert machine.next_deadline == 10.0 + LOST_SECONDS
    assert machine.handle(PlaceTick(), now=10.0 + LOST_SECONDS) == [SendToPlace(0, Kill()), SendToPlace(2, Kill())]
    machine.handle(PlaceReported(0, BAD), now=11.0)
    machine.handle(PlaceReported(2, BAD), now=11.0)
    assert machine.is_over
    assert machine.lost == [PlaceLost(1, "died")]


def test_a_later_end_does_not_put_off_the_end_of_the_others() -> None:
    machine = PlacesMachine(3, grace=60.0)
    machine.handle(PlaceLost(1, "died"), now=10.0)
    machine.handle(PlaceReported(2, BAD), now=11.0)
    assert machine.next_deadline == 10.0 + LOST_SECONDS


def test_what_does_not_die_is_given_up() -> None:
    machine = PlacesMachine(2, grace=1.0)
    machine.handle(PlaceReported(0, BAD), now=0.0)
    assert machine.handle(PlaceTick(), now=1.0 + MARGIN_SECONDS) == [SendToPlace(1, Kill())]
    assert machine.handle(PlaceTick(), now=1.0 + 2 * MARGIN_SECONDS) == []
    assert machine.is_over
    assert machine.unreported == (1,)


def test_the_second_interrupt_kills() -> None:
    machine = PlacesMachine(2, grace=30.0)
    assert machine.handle(CallerInterrupted(), now=0.0) == [SendToPlace(0, Interrupt()), SendToPlace(1, Interrupt())]
    assert machine.handle(CallerInterrupted(), now=1.0) == [SendToPlace(0, Kill()), SendToPlace(1, Kill())]
    assert machine.handle(CallerInterrupted(), now=1.5) == []
    assert not machine.is_over


def test_news_of_a_place_that_has_ended_change_nothing() -> None:
    machine = PlacesMachine(2, grace=5.0)
    machine.handle(PlaceReported(1, GOOD), now=0.0)
    machine.handle(PlaceLost(1, "its worker left"), now=0.5)
    machine.handle(PlaceReported(0, GOOD), now=1.0)
    assert machine.is_over
    assert machine.lost == []
