"""Threads in which futures are completed."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from logging.handlers import QueueHandler

import pytest

from asyncpar.torch import work
from asyncpar.torch.work import Completions

SOON = 5.0
"""Seconds: less than a thread waits for more work, and far more than one needs."""


class Function:
    def __init__(self) -> None:
        self.was_called = threading.Event()

    def __call__(self) -> None:
        self.was_called.set()


def test_functions_may_wait_for_those_that_come_after_them() -> None:
    completions = Completions()
    turns = [threading.Event() for _ in range(5)]
    passed: list[int] = []

    def wait(number: int) -> None:
        if turns[number + 1].wait(SOON):
            passed.append(number)
            turns[number].set()

    for number in range(4):
        completions.run(lambda number=number: wait(number))  # type: ignore[misc]
    completions.run(turns[4].set)
    assert turns[0].wait(SOON)
    assert passed == [3, 2, 1, 0]


def test_a_thread_lets_go_of_what_it_has_done_while_it_waits_for_more() -> None:
    completions, function, is_gone = Completions(), Function(), threading.Event()
    weakref.finalize(function, is_gone.set)
    completions.run(function)
    del function
    assert is_gone.wait(SOON)


def test_threads_end_when_nothing_comes_and_others_do_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "IDLE_SECONDS", 0.01)
    completions = Completions("completions of this test")
    for _ in range(3):
        function = Function()
        completions.run(function)
        assert function.was_called.wait(SOON)
        for thread in threading.enumerate():
            if thread.name == "completions of this test":
                thread.join(SOON)
                assert not thread.is_alive()


def test_a_function_that_raises_is_logged_and_the_next_ones_are_run() -> None:
    completions, last, records = Completions(), Function(), queue.SimpleQueue[logging.LogRecord]()
    handler, logger = QueueHandler(records), logging.getLogger(work.__name__)
    logger.addHandler(handler)
    try:
        completions.run(lambda: 1 // 0)
        assert "a callback of a future failed" in records.get(timeout=SOON).getMessage()
        completions.run(last)
        assert last.was_called.wait(SOON)
    finally:
        logger.removeHandler(handler)
