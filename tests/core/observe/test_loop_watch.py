"""The loop watch: code that blocks the loop is reported while it does, and nothing else is."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from asyncpar.core.observe.loop_watch import Blocked, LoopWatch, Sleeper, check_blocked_after, format_frames
from asyncpar.errors import UsageError

LIMIT = 30.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class Reports:
    """The reports that an observer got; ``wait`` blocks the thread that calls it, on purpose."""

    def __init__(self) -> None:
        self.seen: list[Blocked] = []
        self._news = threading.Condition()

    def __call__(self, blocked: Blocked) -> None:
        with self._news:
            self.seen.append(blocked)
            self._news.notify_all()

    def wait(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.seen) >= count, LIMIT)


@contextmanager
def watching(*, blocked_after: float = 0.1, whose: str | None = None) -> Iterator[Reports]:
    watch = LoopWatch(rank=3, blocked_after=blocked_after, describe=lambda task: whose)
    reports = Reports()
    watch.subscribe(reports)
    watch.start()
    try:
        yield reports
    finally:
        watch.stop()


def run(loop: str, main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


async def a_turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_task_that_blocks_the_loop_is_reported_while_it_does_and_when_it_is_over(loop: str) -> None:
    async def main() -> None:
        with watching(whose="actor 'c', endpoint add") as reports:
            await a_turn()
            begin = time.monotonic()
            reports.wait(1)  # blocks until it is reported
            during = time.monotonic() - begin
            await a_turn()
            await asyncio.to_thread(reports.wait, 2)
        first, second = reports.seen
        assert (first.rank, first.what, first.is_over) == (3, "actor 'c', endpoint add", False)
        assert 0.1 <= first.seconds <= during
        assert "reports.wait(1)" in first.stack
        assert "run_forever" not in first.stack
        assert (second.what, second.is_over, second.stack) == (first.what, True, first.stack)
        assert second.seconds >= first.seconds

    run(loop, main)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_callback_of_no_task_is_reported_too(loop: str) -> None:
    async def main() -> None:
        with watching() as reports:
            asyncio.get_running_loop().call_soon(lambda: reports.wait(1))
            await a_turn()
            await asyncio.to_thread(reports.wait, 2)
        assert [report.what for report in reports.seen] == ["a callback", "a callback"]
        assert "reports.wait(1)" in reports.seen[0].stack

    run(loop, main)


async def test_a_task_that_nobody_knows_is_called_by_its_name() -> None:
    with watching() as reports:

        async def block() -> None:
            reports.wait(1)

        await a_turn()
        await asyncio.create_task(block(), name="the culprit")
    assert reports.seen[0].what == "task 'the culprit'"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_sleeps_and_one_with_very_much_to_do_are_left_in_peace(loop: str) -> None:
    async def work() -> None:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass

    async def main() -> None:
        with watching(blocked_after=0.2) as reports:
            await asyncio.sleep(0.3)  # a loop that sleeps for longer than it may be blocked is what this is about
            await asyncio.gather(*(work() for _ in range(600)))  # one turn of the loop, far longer than 0.2 s
        assert reports.seen == []

    run(loop, main)


async def test_stalls_are_logged_as_warnings_with_the_stack(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncpar.runtime"), watching(whose="actor 'c'") as reports:
        await a_turn()
        reports.wait(1)
        await asyncio.to_thread(reports.wait, 2)
    begin, end = caplog.messages
    assert begin.startswith("rank 3: actor 'c' has blocked the event loop for 0.1")
    assert "reports.wait(1)" in begin
    assert end.startswith("rank 3: the event loop goes on; actor 'c' had blocked it for ")


async def test_an_observer_that_raises_is_logged_and_the_others_are_notified(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(rank=0, describe=lambda task: None)
    reports = Reports()

    def fail(blocked: Blocked) -> None:
        raise RuntimeError("broken observer")

    watch.subscribe(fail)
    watch.subscribe(reports)
    watch.start()
    await a_turn()
    reports.wait(1)
    watch.stop()
    assert "broken observer" in caplog.text


async def test_a_removed_subscriber_is_not_notified() -> None:
    watch = LoopWatch(rank=0, describe=lambda task: None)
    gone, reports = Reports(), Reports()
    unsubscribe = watch.subscribe(gone)
    watch.subscribe(reports)
    unsubscribe()
    unsubscribe()
    watch.start()
    await a_turn()
    reports.wait(1)
    watch.stop()
    assert gone.seen == []


async def test_the_watch_ends_at_once_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # a thread of an earlier test may still be on its way out
    with watching():
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before


async def test_the_watch_may_be_stopped_by_the_code_that_blocks_the_loop() -> None:
    watch = LoopWatch(rank=0, describe=lambda task: None)
    reports = Reports()
    watch.subscribe(reports)
    watch.start()
    await a_turn()
    reports.wait(1)
    watch.stop()
    watch.stop()
    assert not watch.is_running


@pytest.mark.parametrize(("given", "meant"), [(None, None), (0, None), (0.0, None), (1, 1.0), (0.25, 0.25)])
def test_none_and_zero_mean_no_watch(given: object, meant: float | None) -> None:
    assert check_blocked_after(given) == meant


@pytest.mark.parametrize("wrong", [-1, "soon", float("nan"), 1e9])
def test_what_is_no_time_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="blocked_after: expected up to 3600 seconds, or 0 for no watch, got"):
        check_blocked_after(wrong)


def test_a_loop_that_someone_else_runs_anew_is_known_when_it_sleeps() -> None:
    watch = LoopWatch(rank=0, describe=lambda frame: None)
    with closing(uvloop.new_event_loop()) as loop:
        sleeper = Sleeper(threading.get_ident(), loop)

        def wait_asleep() -> bool:
            end = time.monotonic() + LIMIT
            while sleeper.is_awake() and time.monotonic() < end:
                time.sleep(0.001)
            return not sleeper.is_awake()

        async def look(answer: Callable[[], None]) -> bool:
            loop.call_soon(answer)
            return await asyncio.to_thread(wait_asleep)

        def clean_up() -> object:
            return loop.run_until_complete(look(lambda: watch._answer(sleeper)))  # noqa: SLF001  # called as the watch schedules it, on a loop that ran before and runs anew

        assert loop.run_until_complete(look(sleeper.learn))
        assert clean_up()


def test_frames_without_a_line_number_are_shown() -> None:
    frame = sys._getframe()  # noqa: SLF001  # documented in the library reference; a real frame is changed into one without a line
    lineless: Any = SimpleNamespace(
        f_code=frame.f_code, f_lineno=None, f_globals=frame.f_globals, f_locals={}, f_back=None, f_lasti=-1
    )
    shown = format_frames([lineless, frame])
    assert shown.count("test_frames_without_a_line_number_are_shown") >= 2


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stall_whose_code_cannot_be_shown_is_reported_all_the_same(loop: str) -> None:
    def fail(frame: object) -> str:
        raise TypeError("no line")

    async def main() -> None:
        watch, reports = LoopWatch(rank=3, blocked_after=0.1, describe=fail), Reports()
        watch.subscribe(reports)
        watch.start()
        try:
            for count in (1, 3):
                await a_turn()
                reports.wait(count)
                await a_turn()
                await asyncio.sleep(0.1)
        finally:
            watch.stop()
        assert [blocked.what for blocked in reports.seen] == ["some code"] * 4
        assert "its stack cannot be shown: TypeError('no line')" in str(reports.seen[0])

    run(loop, main)
