"""A task group that does not change the cancellation count of the task that awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class CleanTaskGroup(asyncio.TaskGroup):
    """A task group after which ``asyncio.current_task().cancelling()`` is what it was before.

    ``asyncio.TaskGroup`` cancels the task that waits at the end of its block when one of its tasks fails, and takes
    that back only if it happens before the end of the block; otherwise ``cancelling()`` stays one too high.  So here
    the wait for the tasks happens inside the block.
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
    """Whether the current task has a cancellation that was not taken back."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
