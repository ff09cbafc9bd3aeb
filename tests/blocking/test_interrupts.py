"""Signals during visits: what the main thread does on the loop it does as a whole, and handlers run after it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from asyncpar.blocking import LoopThread
from asyncpar.blocking.interrupts import do_uninterrupted
from asyncpar.core.signals import HANDLED


class Raised(Exception):
    pass


def complain(number: int, _: object) -> NoReturn:
    raise Raised(signal.Signals(number).name)


@contextmanager
def handled(handlers: dict[signal.Signals, Callable[[int, Any], object]]) -> Iterator[None]:
    """Signals have these handlers in the block."""
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@pytest.mark.parametrize("number", HANDLED, ids=lambda number: number.name)
def test_a_handler_that_raises_does_so_after_a_visit(thread: LoopThread, number: signal.Signals) -> None:
    """As those of alarms do, and that by which torch's DataLoader reports that a worker has died."""
    done: list[int] = []

    def visit() -> None:
        signal.raise_signal(number)
        done.append(1)

    with handled({number: complain}):
        with pytest.raises(Raised, match=f"^{number.name}$"):
            thread.loop.request(visit)
        assert signal.getsignal(number) is complain
    thread.do(int)  # which waits for a visit that the loop's thread does
    assert done == [1]
    assert thread.call(lambda: asyncio.sleep(0, 5)) == 5


def test_all_that_came_are_handled_once_and_in_their_order() -> None:
    received: list[int] = []

    def receive(number: int, _: object) -> NoReturn:
        received.append(number)
        raise Raised(signal.Signals(number).name)

    def visit(_: object) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
            signal.raise_signal(number)
        assert received == []

    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM)
    with handled(dict.fromkeys(numbers, receive)), pytest.raises(Raised, match="SIGALRM") as raised:
        do_uninterrupted(visit, None)
    assert received == [signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM]
    assert str(raised.value.__context__) == "SIGTERM"


def test_while_a_handler_runs_that_had_to_wait_others_need_not() -> None:
    """It may take long, such as one that saves a checkpoint, and Ctrl-C ends it all the same."""
    found: list[Any] = []

    def save(_: int, __: object) -> None:
        found.extend([signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)])

    with handled({signal.SIGINT: complain, signal.SIGUSR1: save}):
        do_uninterrupted(signal.raise_signal, signal.SIGUSR1)
        assert found == [complain, save]
