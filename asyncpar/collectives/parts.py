"""Streamed results: the parts of a result as they are finished, while the rest is in flight.

Theory of operation.  A streamed operation runs in a task of its own, which the stream starts when the first part is
requested, so that it goes on while its reader works on a part.  The operation calls ``take`` for each range of elements
whose values are final, and whose memory no rank reads or writes any more; parts wait in ``FinishedParts`` until they
are read.  They are views, so waiting costs nothing.  The task ends with the stream: a reader that is cancelled, or
leaves early, cancels it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError

TakePart = Callable[[Array, int, int], None]
"""``take(flat, start, stop)``: elements ``start`` to ``stop`` of the flat result are final."""


class Part(NamedTuple):
    """A finished part of a result.

    ``where`` is its slice of the flat result, in C order; ``values`` are its elements: a view of the result where that
    is contiguous, else a copy.
    """

    where: slice
    values: Array


class FinishedParts:
    """Finished parts that wait for their reader, and the reader that waits for parts."""

    def __init__(self) -> None:
        self.ready: deque[Part] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.hand_over: Callable[[Part], object] = self.ready.append

    def take(self, flat: Array, start: int, stop: int) -> None:
        """Add a finished part, if it has elements.  See ``TakePart``."""
        if start < stop:
            self.hand_over(Part(slice(start, stop), flat[start:stop]))
            self.wake()

    def wake(self, _: object = None) -> None:
        """Wake the reader."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class PartStream(AsyncIterator[Part]):
    """The parts of the result of an operation, in the order in which they are finished.

    Each comes once, and together they are the whole result (an empty one has no parts).  A part belongs to its reader:
    nothing else reads or writes its memory any more.  Errors are those of the operation, raised when the next part is
    requested; earlier parts are correct, but other ranks need not have got them.

    Leaving a loop over it early, closing or dropping it cancels the operation, unless it is over; the other ranks get
    ``PeerCancelled``, and the group stays usable.  One task reads at a time.
    """

    def __init__(self, call: Coroutine[Any, Any, object], parts: FinishedParts) -> None:
        self._call: Coroutine[Any, Any, object] | None = call
        self._parts = parts
        self._task: asyncio.Task[object] | None = None
        self._is_closed = False

    async def __anext__(self) -> Part:
        if self._is_closed:
            raise StopAsyncIteration
        task, ready = self._task or self._begin(), self._parts.ready
        while not (ready and _goes_well(task)):
            if task.done():
                task.result()
                raise StopAsyncIteration
            await self._wait(task)
        return ready.popleft()

    def each(self, take: Callable[[Part], object]) -> Coroutine[Any, Any, object]:
        """Return an awaitable that runs the operation, and calls ``take`` with each part, on the loop.

        Use it instead of iteration where parts are passed on anyway.  An exception of ``take`` fails the operation.
        """
        call, self._call = self._call, None
        if call is None:
            raise UsageError("parts: expected a stream that has not begun, got one that is read or closed")
        self._is_closed = True
        self._parts.hand_over = take
        return call

    async def aclose(self) -> None:
        """Cancel the operation, and return when it has ended here.  Idempotent."""
        self._is_closed = True
        call, self._call = self._call, None
        if call is not None:
            call.close()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._parts.ready.clear()

    def __del__(self) -> None:
        task = self._task
        if task is not None and not task.done() and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _begin(self) -> asyncio.Task[object]:
        call, self._call = self._call, None
        assert call is not None, "a stream has one call, which it makes a task of once"
        self._task = task = asyncio.get_running_loop().create_task(call, name=getattr(call, "__qualname__", None))
        task.add_done_callback(_retrieve)
        task.add_done_callback(self._parts.wake)
        return task

    async def _wait(self, task: asyncio.Task[object]) -> None:
        """Wait until there is another part, or the operation is over."""
        parts = self._parts
        if parts.waiter is not None:
            raise UsageError("parts: a task waits for the next part already; a stream has one reader at a time")
        parts.waiter = asyncio.get_running_loop().create_future()
        try:
            await parts.waiter
        except asyncio.CancelledError as error:
            if not task.done():
                task.cancel(*error.args)
                await asyncio.wait([task])
            if task.cancelled():
                await task  # its error describes the wait
            raise
        finally:
            parts.waiter = None


def _goes_well(task: asyncio.Task[object]) -> bool:
    """Return whether it is running, or over without an error."""
    return not task.done() or not (task.cancelled() or task.exception())


def _retrieve(task: asyncio.Task[object]) -> None:
    """Retrieve the error of a task whose reader may have left."""
    if not task.cancelled():
        task.exception()
