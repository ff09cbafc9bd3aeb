"""From a compute thread to the event loop and back: how synchronous layers communicate.

A layer that runs in a compute thread must wait for its peers in the middle of its work.  ``call`` runs a coroutine on
the loop and blocks the thread, not the loop, until it has its result.  A thread cannot be cancelled, but what it waits
for can: ``interrupt`` cancels that, so that the thread goes on, with ``Interrupted``, and comes to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from asyncpar.errors import AsyncparError

T = TypeVar("T")


class Interrupted(AsyncparError):  # noqa: N818
    """What a compute thread waited for was cancelled; not ``CancelledError``, which would pass for one of its task."""


class PendingResult(Generic[T]):
    """A result that is on its way; ``wait`` is for compute threads."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Has it come, or failed?"""
        return self._future.done()

    def wait(self) -> T:
        """Return it, or raise what its coroutine has raised; ``Interrupted`` if that was asked for."""
        return self._future.result()


class LoopBridge:
    """Runs coroutines on ``loop`` for compute threads.

    Made on the loop, or given one.  What is under way when the loop ends must have been interrupted before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_interrupted = False

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that ``make`` returns and block this thread until it has its result."""
        return self.start(make).wait()

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> PendingResult[T]:
        """Begin the coroutine that ``make`` returns on the loop; coroutines begin in the order of these calls."""
        future: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin, make, future)
        return PendingResult(future)

    def interrupt(self) -> None:
        """Cancel all that is under way, and whatever is begun before ``resume``.  Called on the loop."""
        self._is_interrupted = True
        for task in self._tasks:
            task.cancel()

    def resume(self) -> None:
        """Take calls again."""
        self._is_interrupted = False

    def _begin(self, make: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        if self._is_interrupted:
            future.set_exception(Interrupted("the step was interrupted while its thread waited for other ranks"))
            return
        task = self._loop.create_task(_start(make))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._settle(done, future))

    def _settle(self, task: asyncio.Task[T], future: Future[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            future.set_exception(Interrupted("the step was interrupted while its thread waited for other ranks"))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


async def _start(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await make()
