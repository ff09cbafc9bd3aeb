"""Threads visit a loop: nothing is lost, nothing is done twice, and everything in order."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from asyncpar.blocking import LoopThread
from asyncpar.blocking.caller_runs_loop import CallerRunsLoop

THREADS = 6


@contextmanager
def in_threads(work: list[threading.Thread]) -> Iterator[None]:
    for one in work:
        one.start()
    yield
    for one in work:
        one.join(30)
        assert not one.is_alive(), "a thread hangs"


def until(condition: threading.Event) -> None:
    assert condition.wait(20), "it never happened"


def test_requests_of_a_thread_are_done_in_their_order_in_any_thread(thread: LoopThread) -> None:
    done: list[tuple[int, int]] = []

    def ask(number: int) -> None:
        for step in range(800):
            thread.loop.request(partial(done.append, (number, step)))

    with in_threads([threading.Thread(target=ask, args=(number,)) for number in range(THREADS)]):
        pass
    thread.do(lambda: None)
    assert len(done) == THREADS * 800
    for number in range(THREADS):
        assert [step for who, step in done if who == number] == list(range(800))


def test_only_one_thread_at_a_time_is_in_the_loop(thread: LoopThread) -> None:
    inside = 0
    most = 0

    def enter() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1

    async def step() -> None:
        enter()
        await asyncio.sleep(0)
        enter()

    def work() -> None:
        for _ in range(150):
            thread.loop.request(enter)
            thread.call(step)

    with in_threads([threading.Thread(target=work) for _ in range(THREADS)]):
        pass
    assert most == 1


@pytest.mark.parametrize("seed", range(3))
def test_no_wake_up_is_lost_when_requests_come_just_as_the_loop_goes_to_sleep(thread: LoopThread, seed: int) -> None:
    """Each request makes the loop busy for a moment, so that the next finds it in every state there is."""

    async def turns(count: int) -> int:
        for _ in range(count):
            await asyncio.sleep(0)
        return count

    def work(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        for _ in range(200):
            count = dice.randrange(4)
            kind = dice.randrange(4)
            if kind == 0:
                assert thread.call(partial(turns, count)) == count
            elif kind == 1:
                assert thread.start(partial(turns, count)).wait(20) == count
            elif kind == 2:
                assert thread.do(partial(abs, count)) == count
            else:
                came = threading.Event()
                thread.loop.request(partial(thread.loop.call_soon, came.set))
                until(came)

    with in_threads([threading.Thread(target=work, args=(number,)) for number in range(THREADS)]):
        pass


def test_a_timer_that_a_visitor_sets_wakes_the_sleeping_loop(thread: LoopThread) -> None:
    thread.do(lambda: None)
    for _ in range(20):
        rung = threading.Event()
        thread.loop.request(partial(thread.loop.call_later, 0.001, rung.set))
        until(rung)


def test_a_file_that_a_visitor_watches_is_seen_by_the_sleeping_loop(thread: LoopThread) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        for number in range(20):
            came: list[bytes] = []
            seen = threading.Event()

            def read(came: list[bytes] = came, seen: threading.Event = seen) -> None:
                came.append(ours.recv(10))
                thread.loop.remove_reader(ours)
                seen.set()

            thread.loop.request(partial(thread.loop.add_reader, ours, read))
            theirs.send(bytes([number]))
            until(seen)
            assert came == [bytes([number])]


def test_a_file_that_a_visitor_forgets_calls_nobody(thread: LoopThread) -> None:
    """Also if the loop's thread has noticed it already, and waits for the turn to report it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        received: list[int] = []
        thread.do(lambda: thread.loop.add_reader(ours, lambda: received.append(1)))

        def forget() -> None:
            theirs.send(b"x")
            time.sleep(0.01)  # the loop's thread comes back from its system call meanwhile, and cannot get in
            thread.loop.remove_reader(ours)

        thread.do(forget)
        thread.call(lambda: asyncio.sleep(0))
        assert received == []


def test_the_loop_gets_its_turn_however_often_it_is_visited(thread: LoopThread) -> None:
    rung = threading.Event()
    thread.do(lambda: thread.loop.call_later(0.01, rung.set))
    end = time.monotonic() + 20
    while not rung.is_set():
        assert time.monotonic() < end, "the loop was kept out"
        thread.do(int)


def test_a_request_may_make_requests(thread: LoopThread) -> None:
    done: list[int] = []

    def first() -> None:
        thread.loop.request(lambda: done.append(2))
        done.append(1)

    thread.loop.request(first)
    thread.do(lambda: None)
    assert done == [1, 2]


def test_callbacks_of_the_loop_may_make_requests(thread: LoopThread) -> None:
    done = threading.Event()
    thread.do(lambda: thread.loop.call_later(0.001, thread.loop.request, done.set))
    until(done)


def test_a_request_that_raises_leaves_the_loop_to_others() -> None:
    """It must not, but if it does: nobody else hangs for it."""
    loop = CallerRunsLoop()
    with pytest.raises(ZeroDivisionError):
        loop.request(lambda: 1 / 0)
    done: list[int] = []
    loop.request(lambda: done.append(1))
    assert done == [1]
    assert not loop.turn.locked()
    loop.close()


def test_with_asyncio_in_debug_mode_only_the_loops_thread_does_requests(thread: LoopThread) -> None:
    thread.do(lambda: thread.loop.set_debug(True))
    names = {thread.do(lambda: threading.current_thread().name) for _ in range(20)}
    assert names == {"loop under test"}
    assert thread.call(lambda: asyncio.sleep(0.001, 7)) == 7


def test_a_visitor_keeps_the_loop_of_its_own_thread(thread: LoopThread) -> None:
    """As in a notebook, whose main thread runs a loop while its cells run."""

    async def cell() -> None:
        mine = asyncio.get_running_loop()
        assert thread.do(asyncio.get_running_loop) is thread.loop
        assert thread.call(lambda: asyncio.sleep(0, 5)) == 5
        assert asyncio.get_running_loop() is mine

    asyncio.run(cell())
