"""Tasks of the event loop: off-loading of blocking work, task groups, and checks of the running loop."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import TracebackType
from typing import Any, TypeVar

from asyncpar.core.concurrency.worker import Once, until_done
from asyncpar.errors import UsageError

T = TypeVar("T")

INLINE_BYTES = 1 << 18
"""Work on an array of up to this many bytes takes less time than handing it to a thread."""

INLINE_COPY_BYTES = 4 << 20
"""Copying more bytes than this into fresh memory blocks the loop for a millisecond or more."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, of uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def off_loop(work: Callable[[], T], *, nbytes: int, inline: int | None = None) -> T:
    """Do ``work`` on ``nbytes`` of memory: on the loop if they are at most ``inline``, else in a thread.

    ``inline`` is ``INLINE_BYTES`` by default.  A cancelled caller still waits for the thread (milliseconds), because
    others will use the memory; the result or error of the work is then dropped.
    """
    if nbytes <= (INLINE_BYTES if inline is None else inline):
        return work()
    return await until_done(asyncio.get_running_loop().run_in_executor(None, Once(work)))


class CleanTaskGroup(asyncio.TaskGroup):
    """A task group that leaves ``asyncio.current_task().cancelling()`` as it was before.

    ``asyncio.TaskGroup`` cancels the task that waits at the end of its block when one of its tasks fails, and undoes
    that only if it happens before the end of the block; otherwise ``cancelling()`` stays one too high.  So here the
    wait for the tasks happens inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[asyncio.Task[Any]] = set()

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = super().create_task(coro, name=name, context=context)
        self._made.add(task)
        task.add_done_callback(self._made.discard)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                while self._made:
                    await asyncio.wait(self._made, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as cancelled:
                kind, error, traceback = type(cancelled), cancelled, cancelled.__traceback__
        await super().__aexit__(kind, error, traceback)


def is_task_cancelled() -> bool:
    """Return whether the current task has a cancellation that was not undone."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_home_loop(home: asyncio.AbstractEventLoop | None) -> bool:
    """Return whether ``home`` is the running loop."""
    return home is not None and _get_running_loop() is home


def check_home_loop(home: asyncio.AbstractEventLoop, what: str) -> None:
    """Raise ``UsageError`` about ``what`` unless ``home`` is the running loop: other threads corrupt its state."""
    running = _get_running_loop()
    if running is not home:
        raise UsageError(
            f"{what}: expected on the event loop of its node, got "
            + ("a thread without a running loop" if running is None else "another event loop")
            + "; from a thread, put the call into a coroutine function and pass that coroutine to "
            "asyncio.run_coroutine_threadsafe"
        )
