"""Staying awake for answers: how long it is tried, and that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.net.transport.busy_poll import (
    LONGEST_SECONDS,
    LOOK_SECONDS,
    SHORTEST_SECONDS,
    WAKING_SECONDS,
    BusyPoll,
    CpuPressure,
    SpinPolicy,
)
from asyncpar.net.transport.lane import Sending
from asyncpar.net.transport.stream import SMALL_BYTES
from asyncpar.testing.lanes import RecordingEvents, finished, frame
from tests.net.transport.pairs import open_tcp_pair


def test_patience_halves_in_vain_and_doubles_when_it_pays() -> None:
    patience = SpinPolicy()
    assert patience.seconds == LONGEST_SECONDS
    patience.was_in_vain()
    patience.was_in_vain()
    assert patience.seconds == LONGEST_SECONDS / 4
    patience.came(LONGEST_SECONDS / 2, was_awake=True)
    assert patience.seconds == LONGEST_SECONDS / 2
    patience.came(0.0, was_awake=True)
    patience.came(0.0, was_awake=True)
    assert patience.seconds == LONGEST_SECONDS


def test_patience_does_not_grow_for_what_comes_too_late() -> None:
    patience = SpinPolicy()
    patience.came(1.5 * LONGEST_SECONDS, was_awake=True)
    assert patience.seconds == LONGEST_SECONDS / 2
    for _ in range(20):
        patience.came(1.0, was_awake=False)
    assert patience.seconds == SHORTEST_SECONDS


def test_patience_that_has_ended_comes_back_when_a_sleeper_is_answered_soon() -> None:
    patience = SpinPolicy()
    for _ in range(20):
        patience.was_in_vain()
    assert patience.seconds == SHORTEST_SECONDS
    for _ in range(10):
        patience.came(LONGEST_SECONDS + WAKING_SECONDS / 2, was_awake=False)
    assert patience.seconds == LONGEST_SECONDS


class Clock:
    """Time that passes as it is told, and counts how often it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_vigil_turns_the_loop_until_its_time_is_over() -> None:
    clock = Clock()
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))
    busy_poll.is_allowed = True
    busy_poll.expect()
    await turns(10)
    assert clock.reads >= 10
    clock.now = LONGEST_SECONDS
    await turns(2)
    reads = clock.reads
    await turns(10)
    assert clock.reads == reads


async def test_a_vigil_that_is_not_allowed_does_nothing() -> None:
    clock = Clock()
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))
    busy_poll.expect()
    await turns(10)
    assert clock.reads == 0


async def test_a_vigil_in_vain_makes_the_next_one_shorter_and_one_that_paid_does_not() -> None:
    clock = Clock()
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))
    busy_poll.is_allowed = True

    async def keep(*, paid: bool) -> float:
        """Keep one busy_poll and return how long it would have lasted."""
        begun = clock.now
        busy_poll.expect()
        await turns(5)
        if paid:
            busy_poll.arrived()
        until = busy_poll._until  # noqa: SLF001  # the time at which a watch ends shows nowhere else, as the clock stands still
        clock.now = until
        await turns(2)
        return until - begun

    lengths = [await keep(paid=paid) for paid in (True, False, False, True, True, False)]
    units = [round(length / LONGEST_SECONDS, 3) for length in lengths]
    assert units == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]


async def test_no_vigil_is_kept_while_nothing_comes_in_time_and_again_once_something_does() -> None:
    clock = Clock()
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))
    busy_poll.is_allowed = True
    for _ in range(20):
        busy_poll.expect()
        await turns(5)
        clock.now += 1.0
        await turns(2)
        busy_poll.arrived()
    busy_poll.expect()
    assert not busy_poll._is_watching  # noqa: SLF001  # a watch costs processor time and changes no result: it shows nowhere else
    busy_poll.arrived()
    busy_poll.expect()
    assert busy_poll._is_watching  # noqa: SLF001  # a watch costs processor time and changes no result: it shows nowhere else


async def test_nobody_stays_awake_while_others_wait_for_the_processors() -> None:
    clock = Clock()
    waiting = iter([0.0, 0.0, 1.0])
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: next(waiting)))
    busy_poll.is_allowed = True
    kept = []
    for _ in range(4):
        clock.now += LOOK_SECONDS
        busy_poll.expect()
        kept.append(busy_poll._is_watching)  # noqa: SLF001  # a watch costs processor time and changes no result: it shows nowhere else
        clock.now = busy_poll._until  # noqa: SLF001  # the time at which a watch ends shows nowhere else, as the clock stands still
        await turns(2)
        busy_poll.arrived()
    assert kept == [True, True, False, False]


async def test_two_expectations_of_one_answer_are_judged_once() -> None:
    clock = Clock()
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))
    busy_poll.is_allowed = True
    busy_poll._patience.seconds = 10e-6  # noqa: SLF001  # how long it waits is learned and no setting
    for _ in range(10):  # a request comes, its answer leaves 20 us later, and the next request comes soon
        busy_poll.expect()
        clock.now += 20e-6
        await turns(2)
        busy_poll.expect()
        clock.now += 50e-6
        busy_poll.arrived()
    assert busy_poll._patience.seconds == LONGEST_SECONDS  # noqa: SLF001  # how long it waits is learned and no setting


async def test_a_loop_that_was_busy_with_something_else_learns_nothing() -> None:
    clock = Clock()
    busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))
    busy_poll.is_allowed = True
    for _ in range(3):
        busy_poll.expect()
        clock.now += 1.0  # as a computation would take
        await turns(2)
    busy_poll.expect()
    assert busy_poll._until - clock.now == pytest.approx(LONGEST_SECONDS)  # noqa: SLF001  # the time at which a watch ends shows nowhere else, as the clock stands still


async def test_lanes_keep_the_vigil_after_what_is_small_and_after_nothing_else() -> None:
    async with open_tcp_pair() as (one, other):
        clock = Clock()
        one._busy_poll = BusyPoll(clock=clock, contention=CpuPressure(lambda: None))  # noqa: SLF001  # a lane takes the watch of its connector; here it gets one with the test's clock
        one._busy_poll.is_allowed = True  # noqa: SLF001  # a lane takes the watch of its connector; here it gets one with the test's clock
        events = RecordingEvents()
        one.start(events)
        other.start(RecordingEvents())

        async def asked_while(happening: Sending | None) -> bool:
            """Say whether a busy_poll is kept, and end it."""
            await finished(happening)
            is_watching = one._busy_poll._is_watching  # noqa: SLF001  # a watch costs processor time and changes no result: it shows nowhere else
            clock.now += 1.0
            await turns(2)
            return is_watching

        assert await asked_while(one.send(*frame(0, b"ping")))
        other.send(*frame(0, b"pong"))
        await events.until_tag(0)
        assert await asked_while(None)
        assert not await asked_while(one.send(*frame(1, bytes(SMALL_BYTES))))
        assert not await asked_while(None)
