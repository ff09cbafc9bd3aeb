"""End a block of the program where it waits, without ending its task: as ``asyncio.timeout`` does, on an event."""

from __future__ import annotations

import asyncio


class Interruption:
    """One block of one task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._was_fired = False

    def begin(self) -> None:
        """Begin the block, in the task that calls this."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()

    def interrupt(self) -> None:
        """Cancel the task, once, unless the block is over."""
        if self._task is not None and not self._was_fired:
            self._was_fired = True
            self._task.cancel()

    def end(self, error: BaseException | None) -> bool:
        """End the block with ``error``; return whether ``interrupt`` alone ended it."""
        task, self._task = self._task, None
        if task is None or not self._was_fired:
            return False
        others = task.uncancel() > self._cancelling
        return not others and (error is None or isinstance(error, asyncio.CancelledError))
