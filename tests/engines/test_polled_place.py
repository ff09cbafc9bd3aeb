"""Events of a place that its caller asks for again and again."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.engines import polled_place
from asyncpar.engines.interface import PlaceEvent, PlaceOutput, PlaceReport, encode
from asyncpar.engines.polled_place import pass_events_on
from asyncpar.testing import run_virtual


def test_events_are_passed_on_until_the_report() -> None:
    events: list[PlaceEvent] = [PlaceOutput(b"x", is_error=False), PlaceReport(exit_code=3)]
    answers, taken, lost = [[], [encode(events[0])], [encode(events[1])]], list[PlaceEvent](), list[str]()

    async def ask() -> list[bytes]:
        return answers.pop(0)

    run_virtual(pass_events_on(ask, taken.append, lost.append))
    assert (taken, lost) == (events, [])


def test_a_place_that_does_not_answer_is_lost_when_its_lease_is_over() -> None:
    lost: list[str] = []

    async def ask() -> list[bytes]:
        await asyncio.sleep(polled_place.LEASE_SECONDS - 1.0)  # once just in time
        if asyncio.get_running_loop().time() > polled_place.LEASE_SECONDS:
            await asyncio.sleep(3600.0)
        return []

    run_virtual(pass_events_on(ask, lambda _: None, lost.append))
    assert lost == ["gives no answer within 60 s"]


@pytest.mark.parametrize("error", [RuntimeError("gone\nand more"), TimeoutError("gone")])
def test_a_place_whose_question_fails_has_died(error: Exception) -> None:
    lost: list[str] = []

    async def ask() -> list[bytes]:
        raise error

    run_virtual(pass_events_on(ask, lambda _: None, lost.append))
    assert lost == [f"died ({type(error).__name__}: gone)"]
