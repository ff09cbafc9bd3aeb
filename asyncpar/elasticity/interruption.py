"""End a block of the program where it waits, and judge its end: caused by a change of the world, or by the program.

A block is ended as by ``asyncio.timeout``, without ending its task.  The error of a block may be a group of errors, as
of ``asyncio.TaskGroup`` and ``anyio.create_task_group``: ``program_errors`` is the one place that takes them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncpar.errors import WorldChanged


def is_world_changed(error: BaseException) -> bool:
    """Check that ``error`` is ``WorldChanged``."""
    return isinstance(error, WorldChanged)


def program_errors(
    error: BaseException, is_world_change: Callable[[BaseException], bool], *, is_interrupted: bool = False
) -> BaseException | None:
    """Return the part of ``error`` that is the program's own, None if all of it results from a change of the world.

    Groups of errors are taken apart at any depth: the result is a group of those that are not ``is_world_change``, with
    their tracebacks, or ``error`` itself if it has no others.  ``is_interrupted``: cancellations result from a change,
    too.
    """

    def is_due_to_change(leaf: BaseException) -> bool:
        if isinstance(leaf, BaseExceptionGroup):
            return False  # it is taken apart, whatever else it is
        return (is_interrupted and isinstance(leaf, asyncio.CancelledError)) or is_world_change(leaf)

    if not isinstance(error, BaseExceptionGroup):
        return None if is_due_to_change(error) else error
    changes, others = error.split(is_due_to_change)
    return error if changes is None else others


class Interruption:
    """One block of one task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._was_fired = False

    def begin(self) -> None:
        """Begin the block, in the calling task."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()

    def interrupt(self) -> None:
        """Cancel the task, once, unless the block is over."""
        if self._task is not None and not self._was_fired:
            self._was_fired = True
            self._task.cancel()

    def forbid(self) -> None:
        """Prevent all further interruptions of the block."""
        if not self._was_fired:
            self._task = None

    def end(self) -> bool:
        """End the block; return whether only ``interrupt`` has cancelled its task."""
        task, self._task = self._task, None
        if task is None or not self._was_fired:
            return False
        return task.uncancel() <= self._cancelling
