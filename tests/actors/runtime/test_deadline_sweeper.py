"""Asks that take long are looked at once, and what is found is followed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asyncpar.actors.runtime.deadlines import INSPECTIONS, PERIOD, AlarmClock, DeadlineSweeper
from asyncpar.testing.loop import run_virtual


class Asks:
    """Tasks that wait, watched by a sweeper; ``reports`` is what it found."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, float | None]] = []
        self.looks = 0
        self.sweeper = DeadlineSweeper(lambda call, when: self.reports.append((call, when)))
        self.timeouts: dict[int, asyncio.Timeout] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, call: int, seconds: float | None, limit: float | None = None) -> asyncio.Task[None]:
        async def ask() -> None:
            task = asyncio.current_task()
            assert task is not None
            async with asyncio.timeout(seconds) as self.timeouts[call]:
                self.sweeper.watch(call, task, limit)
                try:
                    await asyncio.Event().wait()
                finally:
                    self.sweeper.forget(call)

        task = asyncio.create_task(ask())
        self.tasks.append(task)
        return task

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.sweeper.is_idle, "a timer was left"


def sweeping(test: Callable[[Asks], Awaitable[None]]) -> None:
    async def main() -> None:
        asks = Asks()
        await test(asks)
        await asks.end()

    run_virtual(main())


def test_the_deadline_of_a_slow_ask_is_reported_once() -> None:
    async def test(asks: Asks) -> None:
        asks.begin(1, 30)
        asks.begin(2, None)
        asks.begin(3, 20)
        await asyncio.sleep(2 * PERIOD + 0.001)
        assert asks.reports == [(1, 30), (3, 20)]
        await asyncio.sleep(10)
        assert len(asks.reports) == 2

    sweeping(test)


def test_of_many_slow_asks_only_some_are_looked_at_in_a_row() -> None:
    async def test(asks: Asks) -> None:
        for call in range(5 * INSPECTIONS):
            asks.begin(call, 30)
        counts = []
        for _ in range(7):
            await asyncio.sleep(PERIOD)
            counts.append(len(asks.reports))
        assert counts == [0, *(turn * INSPECTIONS for turn in (1, 2, 3, 4, 5)), 5 * INSPECTIONS]
        assert [call for call, _ in asks.reports] == list(range(5 * INSPECTIONS))

    sweeping(test)


def test_a_quick_ask_is_never_looked_at_and_leaves_no_timer() -> None:
    async def test(asks: Asks) -> None:
        task = asks.begin(1, 30)
        await asyncio.sleep(PERIOD / 2)
        task.cancel()
        await asyncio.sleep(3 * PERIOD)
        assert asks.reports == []
        assert asks.sweeper.is_idle

    sweeping(test)


def test_no_timer_is_set_while_slow_asks_without_a_deadline_wait() -> None:
    async def test(asks: Asks) -> None:
        asks.begin(1, None)
        await asyncio.sleep(3 * PERIOD)
        assert asks.sweeper.is_idle

    sweeping(test)


def test_a_deadline_that_was_moved_is_reported_when_the_old_one_comes() -> None:
    async def test(asks: Asks) -> None:
        asks.begin(1, 10)
        await asyncio.sleep(5)
        asks.timeouts[1].reschedule(25)
        await asyncio.sleep(6)
        assert asks.reports == [(1, 10), (1, 25)]
        asks.timeouts[1].reschedule(None)
        await asyncio.sleep(30)
        assert asks.reports[2:] == [(1, None)]

    sweeping(test)


def test_a_deadline_that_comes_is_not_reported_again() -> None:
    async def test(asks: Asks) -> None:
        task = asks.begin(1, 10)
        with pytest.raises(TimeoutError):
            await task
        assert asks.reports == [(1, 10)]

    sweeping(test)


def test_a_deadline_later_than_the_limit_is_not_reported() -> None:
    async def test(asks: Asks) -> None:
        asks.begin(1, 10, limit=8)
        asks.begin(2, 10, limit=12)
        await asyncio.sleep(5)
        assert asks.reports == [(2, 10)]

    sweeping(test)


def test_a_limit_that_becomes_known_later_is_reported() -> None:
    async def test(asks: Asks) -> None:
        asks.begin(1, 10)
        asks.begin(2, None)
        asks.begin(3, 5)
        await asyncio.sleep(3)
        asks.reports.clear()
        for call in (1, 2, 3):
            asks.sweeper.tighten(call, 8)
        assert asks.reports == [(1, 8), (2, 8)]

    sweeping(test)


def test_closing_forgets_everything() -> None:
    async def test(asks: Asks) -> None:
        asks.begin(1, 10)
        await asyncio.sleep(1)
        asks.begin(2, 10)
        await asyncio.sleep(0)
        asks.sweeper.close()
        assert asks.sweeper.is_idle

    sweeping(test)


def test_an_alarm_clock_rings_in_order_at_the_last_time_that_was_set() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rung: list[tuple[str, float]] = []
        clock = AlarmClock[str](lambda key: rung.append((key, loop.time())))
        clock.set("late", 9.5)
        clock.set("moved", 1)
        clock.set("early", 2)
        clock.set("moved", 4)
        clock.set("dropped", 3)
        clock.drop("dropped")
        clock.drop("never set")
        await asyncio.sleep(20)
        assert rung == [("early", 2), ("moved", 4), ("late", 9.5)]
        assert not clock.is_ticking

    run_virtual(main())


def test_an_alarm_clock_keeps_no_more_than_twice_what_is_set() -> None:
    async def main() -> None:
        clock = AlarmClock[int](lambda key: None)
        clock.set(-1, 50)
        for key in range(10_000):
            clock.set(key, 100 + key)
            clock.drop(key)
        assert clock.size < 100
        clock.clear()
        assert (clock.size, clock.is_ticking) == (0, False)

    run_virtual(main())
