"""The loop in its thread: what is started there begins in order, and ends whatever happens."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import pytest

from asyncpar.blocking import Cancelled, LoopThread, Pending, background, run_coroutine
from asyncpar.errors import PeerTimeout, UsageError

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="nothing")


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def value(number: int) -> int:
    return number


def test_coroutines_begin_in_the_order_of_the_calls(thread: LoopThread) -> None:
    begun: list[int] = []

    async def begin(number: int) -> None:
        begun.append(number)

    pending = [thread.start(partial(begin, number)) for number in range(500)]
    for one in pending:
        one.wait(20)
    assert begun == list(range(500))


def test_the_maker_is_called_in_the_order_of_the_calls_of_a_thread(thread: LoopThread) -> None:
    """Which is when operations take their numbers."""
    made: dict[int, list[int]] = {who: [] for who in range(4)}

    def work(who: int) -> None:
        def make(number: int) -> Coroutine[Any, Any, int]:
            made[who].append(number)
            return value(number)

        for number in range(0, 200, 2):
            pending = thread.start(partial(make, number))
            assert thread.call(partial(make, number + 1)) == number + 1
            assert pending.wait(20) == number

    workers = [threading.Thread(target=work, args=(who,)) for who in made]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert all(numbers == list(range(200)) for numbers in made.values())


@pytest.mark.parametrize("error", [KeyError("no"), StopIteration(3), SystemExit(4), KeyboardInterrupt()])
def test_what_the_maker_raises_is_raised(thread: LoopThread, error: BaseException) -> None:
    def make() -> NoReturn:
        raise error

    with pytest.raises(type(error)):
        thread.call(make)
    with pytest.raises(type(error)):
        thread.start(make).wait(20)
    assert thread.call(lambda: value(1)) == 1


@pytest.mark.parametrize("error", [KeyError("no"), SystemExit(4), KeyboardInterrupt(), GeneratorExit()])
def test_what_the_coroutine_raises_is_raised_and_the_loop_goes_on(thread: LoopThread, error: BaseException) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)):
        thread.call(fail)
    other = thread.start(lambda: asyncio.sleep(0.01, 5))
    with pytest.raises(type(error)):
        thread.start(fail).wait(20)
    assert other.wait(20) == 5


def test_what_is_no_coroutine_is_refused(thread: LoopThread) -> None:
    with pytest.raises(TypeError, match="coroutine"):
        thread.call(lambda: 3)  # type: ignore[arg-type,return-value]
    assert thread.call(lambda: value(1)) == 1


def test_after_its_time_a_call_is_cancelled_and_says_so(thread: LoopThread) -> None:
    ended = threading.Event()

    async def wait() -> None:
        try:
            await wait_for_ever()
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"lunch: not over within its timeout of 0.02 s") as caught:
        thread.call(wait, timeout=0.02, what="lunch")
    assert not isinstance(caught.value, PeerTimeout)
    assert ended.is_set()
    with pytest.raises(TimeoutError, match="within its timeout"):
        thread.start(wait, timeout=0.02).wait(20)
    assert thread.call(lambda: value(2), timeout=20) == 2


def test_a_result_in_spite_of_the_cancellation_is_a_result(thread: LoopThread) -> None:
    async def stubborn() -> int:
        with suppress(asyncio.CancelledError):
            await wait_for_ever()
        return 9

    assert thread.call(stubborn, timeout=0.01) == 9


def test_the_callers_context_is_that_of_its_coroutine_and_of_nobody_elses(thread: LoopThread) -> None:
    async def read() -> str:
        await asyncio.sleep(0)
        return VARIABLE.get()

    def work(name: str) -> None:
        VARIABLE.set(name)
        got.extend((name, thread.do(VARIABLE.get), thread.call(read), thread.start(read).wait(20)) for _ in range(50))

    got: list[tuple[str, ...]] = []
    workers = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(got) == 200
    assert all(set(names) == {names[0]} for names in got)
    assert thread.call(read) == "nothing"


def test_calls_from_the_loop_itself_are_refused(thread: LoopThread) -> None:
    async def call() -> None:
        thread.call(lambda: value(1))

    for attempt in (call, lambda: thread.do(lambda: value(1))):
        with pytest.raises(UsageError, match="use await, or another thread"):
            thread.call(attempt) if attempt is call else thread.do(attempt)
    with pytest.raises(UsageError, match="runs on the loop"):
        thread.do(thread.close)


def test_memory_stays_the_same_over_many_calls(thread: LoopThread) -> None:
    def work(count: int) -> None:
        for _ in range(count):
            thread.call(lambda: value(1))
            thread.do(int)
            thread.start(lambda: asyncio.sleep(0)).wait(20)

    work(100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work(400)
        thread.do(lambda: None)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 10_000
    assert thread._running == {}  # noqa: SLF001  # finished calls must not stay in memory: the thread lists them nowhere else


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closing_ends_what_others_wait_for() -> None:
    thread = LoopThread()
    errors: list[BaseException] = []

    def wait(number: int) -> None:
        try:
            if number % 2:
                thread.call(wait_for_ever)
            else:
                thread.start(wait_for_ever).wait(20)
        except Exception as error:  # noqa: BLE001  # looked at below
            errors.append(error)

    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(6)]
    for waiter in waiters:
        waiter.start()
    while len(thread._running) < len(waiters):  # noqa: SLF001  # waits until all callers' coroutines have begun: a blocked caller notifies nobody
        thread.do(int)
    thread.close()
    for waiter in waiters:
        waiter.join(20)
        assert not waiter.is_alive()
    assert [type(error) for error in errors] == [Cancelled] * 6


def test_threads_that_start_while_another_closes_get_an_answer() -> None:
    """Whatever the moment: a result, or an error; never nothing."""
    for _ in range(15):
        thread = LoopThread()
        answers: list[object] = []

        def work(thread: LoopThread = thread, answers: list[object] = answers) -> None:
            try:
                while True:
                    thread.start(lambda: value(1)).wait(20)
                    thread.call(lambda: asyncio.sleep(0))
                    thread.do(int)
            except (UsageError, Cancelled) as error:
                answers.append(error)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        thread.do(int)
        thread.close()
        for worker in workers:
            worker.join(20)
            assert not worker.is_alive(), "a thread hangs"
        assert len(answers) == 4


def test_after_closing_everything_is_refused_at_once() -> None:
    thread = LoopThread()
    pending = thread.start(wait_for_ever)
    thread.close()
    thread.close()
    for attempt in (
        lambda: thread.call(wait_for_ever),
        lambda: thread.start(wait_for_ever),
        lambda: thread.do(int),
    ):
        with pytest.raises(UsageError, match="the loop has ended; make a new node"):
            attempt()
    pending.cancel()
    with pytest.raises(Cancelled):
        pending.wait(20)


def test_what_is_to_be_closed_is_closed_first_and_what_was_forgotten_is_not() -> None:
    thread = LoopThread()
    closed: list[str] = []

    async def close(name: str) -> None:
        await asyncio.sleep(0)
        closed.append(name)

    async def fail() -> None:
        raise OSError("cannot")

    thread.at_close("a", lambda: close("a"))
    thread.at_close("b", lambda: close("b"))
    thread.at_close("c", fail)
    thread.forget("b")
    thread.close()
    assert closed == ["a"]


def test_several_threads_may_close_and_all_return_when_it_is_closed() -> None:
    thread = LoopThread()
    closers = [threading.Thread(target=thread.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)
    assert not thread._thread.is_alive()  # noqa: SLF001  # close() says nothing of the thread itself, which must not outlive it


def test_tasks_that_will_not_end_do_not_keep_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.blocking.thread.CLOSING_SECONDS", 0.1)
    thread = LoopThread()

    may_end = threading.Event()

    async def stubborn() -> None:
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    pending = thread.start(stubborn)
    thread.do(lambda: None)
    thread.close()
    with pytest.raises(Cancelled, match="the loop's thread has ended"):
        pending.wait(20)
    may_end.set()
    thread._thread.join(20)  # noqa: SLF001  # it outlives the test otherwise


def test_generators_are_closed_at_the_end() -> None:
    thread = LoopThread()
    closed = threading.Event()

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    generator = items()

    async def first() -> int:
        return await anext(generator)

    assert thread.call(first) == 1
    thread.close()
    assert closed.is_set()


def test_there_is_one_background_loop_and_a_new_one_after_it_was_closed() -> None:
    first = background()
    assert background() is first
    assert run_coroutine(lambda: value(3)) == 3
    first.close()
    second = background()
    assert second is not first
    assert second.call(lambda: value(4)) == 4
    second.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # of Python 3.12 and later
def test_in_a_fork_it_says_so_instead_of_hanging(thread: LoopThread) -> None:
    loop = background()
    pending = thread.start(wait_for_ever)
    child = os.fork()
    if child == 0:
        os._exit(_messages_in_a_fork(thread, loop, pending))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.call(lambda: asyncio.sleep(0.001, 5)) == 5
    pending.cancel()
    loop.close()


def _messages_in_a_fork(thread: LoopThread, loop: LoopThread, pending: Pending[None]) -> int:
    """Return 0 if all is as it should be in the child."""
    signal.alarm(20)  # which ends a child that hangs
    call: Callable[[], object] = lambda: thread.call(lambda: value(1))  # noqa: E731
    for attempt in (call, lambda: thread.do(int), background, lambda: loop.do(int), pending.wait):
        try:
            attempt()
        except UsageError as error:
            if "this process is a fork" not in str(error):
                return 1
        else:
            return 2
    thread.close()
    loop.close()
    return 0
