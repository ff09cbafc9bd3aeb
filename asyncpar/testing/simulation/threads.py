"""Threads in lockstep: real ones, so blocking works, but only one of them or the loop's runs at any time.

A function for an executor is passed to a thread; the loop's thread waits until it returns, or until it waits for the
loop itself (over a ``LoopBridge``, or in ``time.sleep``).  Then the loop goes on, and when the function can go on,
a callback of its process gives the turn back to it.  So a run does not depend on the scheduling of threads.
Functions of an executor with one thread run one after the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Final, TypeVar

from asyncpar.errors import AsyncparError
from asyncpar.testing.simulation.process import CURRENT, SimulatedProcess

T = TypeVar("T")

_DEFAULT_THREADS: Final = 32

_PATIENCE_SECONDS: Final = 300.0
"""Real seconds for which a function may compute; one that takes longer waits for something that can never happen."""


class ThreadEnded(BaseException):
    """Ends a function whose process was killed or whose simulation is over."""


class _Work:
    """One function in its thread."""

    def __init__(
        self, function: Callable[[], Any], result: asyncio.Future[Any], process: SimulatedProcess | None, queue: _Queue
    ) -> None:
        self.function = function
        self.result = result
        self.queue = queue
        self.context = Context() if process is None else process.context.copy()
        self.turn = threading.Semaphore(0)
        self.is_over = False
        self.must_end = False
        self.outcome: tuple[Any, BaseException | None] = (None, None)


class _Queue:
    """The functions of one executor that wait for a thread."""

    def __init__(self, threads: int) -> None:
        self.free = threads
        self.waiting: deque[_Work] = deque()


class LockstepThreads:
    """The threads of one simulation."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._back = threading.Semaphore(0)
        self._queues: dict[int, tuple[object, _Queue]] = {}
        self._here = threading.local()
        self._alive: dict[_Work, None] = {}

    def submit(self, executor: Any, function: Callable[[], T], *, delay: float) -> asyncio.Future[T]:
        """Run ``function`` after ``delay`` seconds, or when a thread of ``executor`` is free."""
        result: asyncio.Future[T] = self._loop.create_future()
        threads = getattr(executor, "_max_workers", _DEFAULT_THREADS)
        _, queue = self._queues.setdefault(id(executor), (executor, _Queue(threads)))
        queue.waiting.append(_Work(function, result, CURRENT.get(), queue))
        self._loop.call_later(delay, self._begin_next, queue)
        return result

    def wait(self, ready: Callable[[Callable[[], None]], None]) -> bool:
        """Let the loop go on until it calls the function passed to ``ready``; return False in a foreign thread."""
        work: _Work | None = getattr(self._here, "work", None)
        if work is None:
            return False
        ready(lambda: self._give_turn(work))
        self._back.release()
        work.turn.acquire()
        if work.must_end:
            raise ThreadEnded
        return True

    def wait_for(self, future: Future[Any]) -> None:
        """Wait for a future that the loop will complete."""
        loop = self._loop

        def notify(go_on: Callable[[], None]) -> None:
            context = self._here.work.context.copy()  # the thread is inside the other context
            future.add_done_callback(lambda _: loop.call_soon(go_on, context=context))

        if not future.done():
            self.wait(notify)

    def sleep(self, seconds: float) -> bool:
        """Do what ``time.sleep`` does in a thread; return False in a foreign thread."""

        def notify(go_on: Callable[[], None]) -> None:
            self._loop.call_later(max(0.0, seconds), go_on)

        return self.wait(notify)

    def close(self) -> None:
        """End all waiting functions."""
        for work in list(self._alive):
            work.must_end = True
            work.turn.release()
            self._back.acquire(timeout=_PATIENCE_SECONDS)
        self._alive.clear()

    def _begin_next(self, queue: _Queue) -> None:
        while queue.free and queue.waiting:
            work = queue.waiting.popleft()
            if not work.result.cancelled():
                queue.free -= 1
                self._alive[work] = None
                threading.Thread(target=self._live, args=(work,), name="asyncpar simulated thread", daemon=True).start()
                self._give_turn(work)

    def _give_turn(self, work: _Work) -> None:
        """Let the thread of ``work`` run until it is done or waits.  Called on the loop."""
        work.turn.release()
        if not self._back.acquire(timeout=_PATIENCE_SECONDS):
            raise AsyncparError(
                f"a simulated thread did not return in {_PATIENCE_SECONDS:.0f} s: it waits for the loop by something "
                "that a simulation does not know; wait over a LoopBridge"
            )
        if work.is_over:
            del self._alive[work]
            value, error = work.outcome
            if not work.result.done():
                if error is not None:
                    work.result.set_exception(error)
                else:
                    work.result.set_result(value)
            work.queue.free += 1
            self._begin_next(work.queue)

    def _live(self, work: _Work) -> None:
        self._here.work = work
        work.turn.acquire()
        try:
            if not work.must_end:
                work.outcome = (work.context.run(work.function), None)
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            work.outcome = (None, error)
        work.is_over = True
        self._back.release()
