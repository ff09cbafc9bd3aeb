"""Waiting beside the bell: who answers it, who is woken, and that it always comes back."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from asyncpar.blocking import LoopThread
from asyncpar.blocking.caller_runs_loop import CallerRunsLoop
from asyncpar.blocking.pending import Pending


class Bell:
    """A pipe whose ring completes ``result``, the future of the waiting thread."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread = thread
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.answered_by: list[int] = []
        self.waiting: list[asyncio.Future[str]] = []
        thread.do(lambda: thread.loop.add_bell(self.read_end, self._answer))

    def ring(self, word: bytes = b"x") -> None:
        os.write(self._write_end, word)

    def wait_for_it(self) -> Pending[str]:
        """Begin to wait, as operations in shared memory do."""
        loop = self.thread.loop
        pending: Pending[str] = Pending(loop, "a ring")

        async def received() -> str:
            self.waiting.append(asyncio.get_running_loop().create_future())
            pending.succeed(await self.waiting[-1])
            return ""

        self.thread.do(lambda: pending.begun(loop.create_task(received()), runs_anywhere=True))
        until_it_sleeps(loop)
        return pending

    def _answer(self) -> None:
        self.answered_by.append(threading.get_ident())
        for word in os.read(self.read_end, 100).decode():
            self.waiting.pop(0).set_result(word)

    def close(self) -> None:
        if not self.thread.is_closed:
            self.thread.do(lambda: self.thread.loop.remove_reader(self.read_end))
        os.close(self.read_end)
        os.close(self._write_end)


def until_it_sleeps(loop: CallerRunsLoop) -> None:
    """Return when the loop has nothing to do: who waits then gets the bell."""
    wake_up: socket.socket = loop._ssock  # type: ignore[attr-defined]  # noqa: SLF001  # the socket that call_soon_threadsafe writes to
    visits: list[int] = []
    end = time.monotonic() + 20
    while not visits:
        assert time.monotonic() < end, "the loop is never through"
        time.sleep(0)
        if not loop._ready and not select.select([wake_up], [], [], 0)[0]:  # noqa: SLF001  # asyncio's queue of callbacks that are due: the loop sleeps only when it is empty
            loop.try_visit(lambda: visits.append(1))


@pytest.fixture
def bell(thread: LoopThread) -> Iterator[Bell]:
    bell = Bell(thread)
    yield bell
    bell.close()


def when_lent(thread: LoopThread, function: Callable[[], object]) -> None:
    """Call ``function`` in another thread as soon as somebody waits with the bell."""
    lent = threading.Event()
    lend = thread.loop.lend_bell

    def tell(borrower: Any) -> int | None:
        bell = lend(borrower)
        if bell is not None:
            lent.set()
        return bell

    def act() -> None:
        assert lent.wait(20), "nobody waits with the bell"
        function()

    thread.loop.lend_bell = tell  # type: ignore[method-assign]
    threading.Thread(target=act).start()


def is_lent(thread: LoopThread) -> bool:
    return thread.do(lambda: not thread.loop.has_bell)


def test_who_waits_answers_the_bell_and_runs_what_comes_of_it(bell: Bell, thread: LoopThread) -> None:
    pending = bell.wait_for_it()
    when_lent(thread, bell.ring)
    assert pending.wait(20) == "x"
    assert bell.answered_by == [threading.get_ident()]


def test_when_nobody_waits_the_loop_answers(bell: Bell, thread: LoopThread) -> None:
    for number in (0, 2):
        alone = bell.wait_for_it()
        bell.ring()
        assert outcome(alone) == "x"
        assert bell.answered_by[number] != threading.get_ident()
        pending = bell.wait_for_it()
        when_lent(thread, bell.ring)
        assert pending.wait(20) == "x"
        assert bell.answered_by[number + 1] == threading.get_ident()


def outcome(pending: Pending[str]) -> str:
    """Return what comes without anyone waiting at the loop."""
    over = threading.Event()
    pending.add_done_callback(lambda _: over.set())
    assert over.wait(20), "it never came"
    return pending.wait()


def test_what_comes_another_way_wakes_who_waits_with_the_bell(bell: Bell, thread: LoopThread) -> None:
    pending = bell.wait_for_it()
    when_lent(thread, lambda: thread.loop.call_soon_threadsafe(lambda: bell.waiting.pop(0).set_result("otherwise")))
    assert pending.wait(20) == "otherwise"
    assert bell.answered_by == []
    assert not is_lent(thread)


def test_one_thread_has_the_bell_and_others_are_woken_all_the_same(bell: Bell, thread: LoopThread) -> None:
    received: list[str] = []
    waits = [bell.wait_for_it() for _ in range(5)]
    threads = [threading.Thread(target=lambda wait=wait: received.append(wait.wait(20))) for wait in waits]
    for one in threads:
        one.start()
    for letter in (b"a", b"bc", b"d", b"e"):
        bell.ring(letter)
    for one in threads:
        one.join(30)
    assert sorted(received) == ["a", "b", "c", "d", "e"]
    assert not is_lent(thread)


def test_the_bell_comes_back_after_a_timeout_and_what_is_under_way_goes_on(bell: Bell, thread: LoopThread) -> None:
    pending = bell.wait_for_it()
    with pytest.raises(TimeoutError, match=r"a ring: not over after 0.01 s; it goes on"):
        pending.wait(0.01)
    assert not is_lent(thread)
    bell.ring()
    assert outcome(pending) == "x"


def test_the_bell_comes_back_when_a_signal_ends_the_wait(bell: Bell, thread: LoopThread) -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise InterruptedError("by a signal")

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        pending = bell.wait_for_it()
        when_lent(thread, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(InterruptedError, match="by a signal"):
            pending.wait(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_lent(thread)
    when_lent(thread, bell.ring)
    assert pending.wait(20) == "x"


def test_a_bell_that_is_taken_down_leaves_who_waits_to_be_woken_otherwise(bell: Bell, thread: LoopThread) -> None:
    pending = bell.wait_for_it()

    def take_down() -> None:
        thread.loop.remove_reader(bell.read_end)
        thread.loop.call_later(0.05, lambda: bell.waiting.pop(0).set_result("otherwise"))

    when_lent(thread, lambda: thread.do(take_down))
    assert pending.wait(20) == "otherwise"
    assert bell.answered_by == []


def test_a_busy_loop_answers_for_who_waits(bell: Bell, thread: LoopThread) -> None:
    pending = bell.wait_for_it()

    def be_busy() -> None:
        bell.ring()
        end = time.monotonic() + 20
        while (
            not thread.loop.requests and time.monotonic() < end
        ):  # until the waiter has noticed it, and leaves it to us
            time.sleep(0)

    when_lent(thread, lambda: thread.loop.call_soon_threadsafe(be_busy))
    assert pending.wait(20) == "x"
    assert bell.answered_by != [threading.get_ident()]


def test_the_end_of_the_loop_wakes_who_waits_with_the_bell(bell: Bell, thread: LoopThread) -> None:
    pending = bell.wait_for_it()
    task = pending.task
    assert task is not None
    task.add_done_callback(lambda _: pending.succeed("the end"))
    when_lent(thread, thread.close)
    assert pending.wait(20) == "the end"


def test_two_bells_are_left_to_the_loop(bell: Bell, thread: LoopThread) -> None:
    other = Bell(thread)
    pending = bell.wait_for_it()
    bell.ring()
    assert pending.wait(20) == "x"
    assert bell.answered_by != [threading.get_ident()]
    other.close()
    again = bell.wait_for_it()
    when_lent(thread, bell.ring)
    assert again.wait(20) == "x"
    assert bell.answered_by[1:] == [threading.get_ident()]
