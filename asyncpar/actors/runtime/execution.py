"""Run user code in a task that outlives it, and in the threads of plain ``def`` endpoints.

The code can be interrupted: the task itself is cancelled, and this is told apart from a real cancellation by counting
(the way ``asyncio.timeout`` does it): when the code has ended, however it ended, the count is taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, TypeVar

T = TypeVar("T")

ENDS_PROGRAM: Final = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that end the program or its tasks; they are no failure of user code that they pass through."""


class Execution:
    """One piece of user code in the task that made this object."""

    __slots__ = ("_interrupts", "_is_over", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] = task
        self._interrupts = 0
        self._is_over = False

    @property
    def is_interrupted(self) -> bool:
        """Was ``interrupt`` called?"""
        return self._interrupts > 0

    def interrupt(self) -> None:
        """Cancel the code, if it still runs."""
        if self._is_over:
            return
        if asyncio.current_task() is self._task:  # the code itself causes this: it must be suspended to be cancelled
            asyncio.get_running_loop().call_soon(self.interrupt)
            return
        self._interrupts += 1
        self._task.cancel()

    async def run(self, work: Awaitable[T]) -> T:
        """Return what ``work`` returns; what ``interrupt`` did to the task meanwhile is undone in the end.

        So are cancellations of the task that ``work`` itself has dealt with.
        """
        before = self._task.cancelling()
        is_cancelled = False
        try:
            return await work
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            self._is_over = True
            for _ in range(self._interrupts if is_cancelled else self._task.cancelling() - before):
                self._task.uncancel()


def is_task_cancelled() -> bool:
    """Is the current task being cancelled for good?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ActorThread:
    """One thread (or more), started when first needed: an actor's blocking code always runs there."""

    __slots__ = ("_executor", "_name", "_threads")

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns.  A cancellation takes effect when it has ended, not before."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix=self._name)
        outcome = asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, _outcome, work)
        cancellation: asyncio.CancelledError | None = None
        while not outcome.done():
            try:
                await asyncio.wait({outcome})
            except asyncio.CancelledError as error:
                cancellation = error
        if cancellation is not None:
            raise cancellation
        value, failure = outcome.result()
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end.  Nothing is running in it any more."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run ``work`` and return (value, None) or (None, error): some exceptions cannot pass through a future."""
    try:
        return work(), None
    except ENDS_PROGRAM:
        raise
    except BaseException as error:  # noqa: BLE001  # raised again in the actor's task
        return None, error
