"""Results on their way, and everything that may happen to them."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from asyncpar.blocking import Cancelled, LoopThread, Pending
from asyncpar.errors import UsageError


async def fail() -> None:
    raise KeyError("gone")


def note(called: list[int], number: int, _: Pending[None]) -> None:
    called.append(number)


def test_callbacks_are_called_once_each_in_order_however_they_race_with_the_end(thread: LoopThread) -> None:
    for _ in range(150):
        called: list[int] = []
        pending = thread.start(lambda: asyncio.sleep(0))
        for number in range(5):
            pending.add_done_callback(partial(note, called, number))
        pending.wait(20)
        thread.do(lambda: None)  # those that the loop has taken out are through
        assert sorted(called) == list(range(5))


def test_a_callback_that_raises_harms_nobody_and_is_reported(thread: LoopThread) -> None:
    reports: list[dict[str, Any]] = []
    thread.do(lambda: thread.loop.set_exception_handler(lambda _, context: reports.append(context)))
    called = threading.Event()
    pending = thread.start(lambda: asyncio.sleep(0.001, 3))
    pending.add_done_callback(lambda _: 1 / 0)
    pending.add_done_callback(lambda _: called.set())
    assert pending.wait(20) == 3
    assert called.wait(20)
    assert isinstance(reports[0]["exception"], ZeroDivisionError)


def test_many_threads_may_wait_for_one_result(thread: LoopThread) -> None:
    gate = asyncio.Event()
    pending = thread.start(gate.wait)
    got: list[object] = []
    waiters = [threading.Thread(target=lambda: got.append(pending.wait(20))) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    thread.do(gate.set)
    for waiter in waiters:
        waiter.join(20)
    assert got == [True] * 8


def test_waiting_in_vain_leaves_no_trace(thread: LoopThread) -> None:
    gate = asyncio.Event()
    pending = thread.start(gate.wait)
    for _ in range(100):
        with pytest.raises(TimeoutError, match="it goes on"):
            pending.wait(0)
    assert pending._gates == []  # noqa: SLF001  # a gate left behind by a wait that timed out shows nowhere else
    thread.do(gate.set)
    assert pending.wait(20) is True


@pytest.mark.parametrize("timeout", [float("inf"), 1e30, -5.0])
def test_any_number_of_seconds_will_do(thread: LoopThread, timeout: float) -> None:
    pending = thread.start(lambda: asyncio.sleep(0.001, 3))
    if timeout < 0:
        assert pending.wait() == 3
    assert pending.wait(timeout) == 3


def test_what_is_raised_again_and_again_does_not_grow(thread: LoopThread) -> None:
    pending = thread.start(fail)
    lengths = set()
    for _ in range(5):
        with pytest.raises(KeyError, match="gone") as caught:
            pending.wait(20)
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1
    assert "fail" in {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}


def test_a_failed_call_leaves_no_cycle_behind(thread: LoopThread) -> None:
    """So the arrays of a call that failed are given back at once, and not when the collector comes along."""

    class Payload:
        pass

    async def fail_with(payload: object) -> None:
        raise KeyError("gone")

    gc.collect()
    gc.disable()
    try:
        payload = Payload()
        known = weakref.ref(payload)
        with suppress(KeyError):
            thread.call(partial(fail_with, payload))
        thread.call(lambda: asyncio.sleep(0))  # the loop has let go of the task, too
        del payload
        assert known() is None
    finally:
        gc.enable()


def test_cancelling_at_once_reaches_the_coroutine(thread: LoopThread) -> None:
    """Wherever the start is: still in the queue, begun, waiting or over."""
    ended: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("ended")

    begun = 0
    for number in range(150):
        pending = thread.start(wait_for_ever)
        if number % 3 == 0:
            thread.do(lambda: None)
        if number % 3 == 1:
            thread.call(lambda: asyncio.sleep(0))
            begun += 1
        pending.cancel()
        with pytest.raises(Cancelled, match="was cancelled"):
            pending.wait(20)
    assert len(ended) >= begun


def test_cancelling_what_is_over_changes_nothing(thread: LoopThread) -> None:
    pending = thread.start(lambda: asyncio.sleep(0, 3))
    assert pending.wait(20) == 3
    pending.cancel()
    assert pending.wait() == 3
    assert pending.exception() is None


def test_waiting_on_the_loop_itself_is_refused(thread: LoopThread) -> None:
    pending = thread.start(lambda: asyncio.sleep(30))

    async def wait() -> None:
        pending.wait()

    with pytest.raises(UsageError, match="this code runs on the loop that it would wait for"):
        thread.call(wait)
    pending.cancel()


def test_it_says_what_it_is(thread: LoopThread) -> None:
    pending = thread.start(lambda: asyncio.sleep(0.001), what="all_reduce")
    pending.wait(20)
    assert repr(pending) == "<Pending all_reduce: done>"
    failed = thread.start(fail)
    with pytest.raises(KeyError):
        failed.wait(20)
    assert "failed: KeyError" in repr(failed)
