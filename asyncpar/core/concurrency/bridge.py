"""Calls from compute threads to the event loop, for layers that communicate.

A layer that runs in a compute thread must wait for its peers in the middle of its work.  ``call`` runs a coroutine on
the loop and blocks the thread, not the loop, until the result is there.  A thread cannot be cancelled, but the
coroutine that it waits for can: ``interrupt`` cancels it, and the thread gets ``BridgeInterrupted`` and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from asyncpar.errors import AsyncparError

T = TypeVar("T")


class BridgeInterrupted(AsyncparError):  # noqa: N818
    """The coroutine that a compute thread waited for was interrupted; its own task was not cancelled."""


class PendingResult(Generic[T]):
    """The result of a coroutine on the loop; ``wait`` is for compute threads."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether the coroutine has ended."""
        return self._future.done()

    def wait(self) -> T:
        """Return the result, or raise what the coroutine raised; ``BridgeInterrupted`` if it was interrupted."""
        return self._future.result()


class LoopBridge:
    """Runs coroutines on ``loop`` for compute threads.

    Created on the loop, or given one.  Interrupt it before the loop ends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_interrupted = False

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that ``make`` returns and block this thread until it ends; return its result."""
        return self.start(make).wait()

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> PendingResult[T]:
        """Start the coroutine that ``make`` returns on the loop; coroutines start in the order of these calls."""
        future: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin, make, future)
        return PendingResult(future)

    def interrupt(self) -> None:
        """Cancel all calls under way, and any started before ``resume``.  Called on the loop."""
        self._is_interrupted = True
        for task in self._tasks:
            task.cancel()

    def resume(self) -> None:
        """Accept calls again."""
        self._is_interrupted = False

    def _begin(self, make: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        if self._is_interrupted:
            future.set_exception(BridgeInterrupted("the step was interrupted while its thread waited for other ranks"))
            return
        task = self._loop.create_task(_start(make))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._settle(done, future))

    def _settle(self, task: asyncio.Task[T], future: Future[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            future.set_exception(BridgeInterrupted("the step was interrupted while its thread waited for other ranks"))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


async def _start(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await make()
