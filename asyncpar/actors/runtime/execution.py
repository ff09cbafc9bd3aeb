"""Run user code in a task that outlives it.

The code can be interrupted: the task itself is cancelled, and this is told apart from a real cancellation by counting
(the way ``asyncio.timeout`` does it): when the code has ended, however it ended, the count is taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


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
