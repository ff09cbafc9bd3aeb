"""A pending result of the loop, for the threads that wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from asyncpar.blocking.caller_runs_loop import CallerRunsLoop
from asyncpar.blocking.doorbell_waiter import DoorbellWaiter
from asyncpar.blocking.interrupts import longest_sleep
from asyncpar.errors import AsyncparError

T = TypeVar("T")


class Cancelled(AsyncparError):  # noqa: N818
    """The operation that a thread waited for was cancelled.

    This is not a ``CancelledError``, which would be mistaken for a cancellation of the waiting task.
    """


class Pending(Generic[T]):
    """The result of ``LoopThread.start``.  Thread-safe.

    Theory of operation.  The thread that finishes it stores the outcome, then ``is_done``, then opens all gates and
    calls all callbacks that it finds.  A thread that waits adds a gate, then checks ``is_done``.  So one of the two
    sees the other, without a lock; taking a gate or callback out of its list is atomic, so each is used once.

    Cancelling is a request to the loop, like starting, so it always comes after the start.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_gates",
        "_loop",
        "_task",
        "_traceback",
        "_value",
        "expired_after",
        "is_done",
        "runs_anywhere",
        "what",
    )

    def __init__(self, loop: CallerRunsLoop, what: str = "") -> None:
        self.is_done = False
        """Whether it has a result or an error."""
        self.what = what
        """Its name in messages."""
        self.expired_after: float | None = None
        """The seconds after which it was cancelled because its time was up."""
        self._loop = loop
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._gates: list[threading.Lock | DoorbellWaiter] = []
        self._callbacks: list[Callable[[Pending[T]], object]] = []
        self._task: asyncio.Task[Any] | None = None
        self.runs_anywhere = False
        """Whether other threads may run its steps in place of the loop's."""

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task that works on it; None before it has begun and after it is over."""
        return self._task

    def wait(self, timeout: float | None = None) -> T:
        """Return the result, or raise the coroutine's exception (``Cancelled`` if it was cancelled).

        Raises ``TimeoutError`` after ``timeout`` seconds (None: never); the coroutine then goes on.  Raises
        ``UsageError`` in the child of a fork, where the result never comes.
        """
        if not self.is_done:
            self._wait(timeout)
        error = self._error
        if error is None:
            return cast("T", self._value)
        try:
            raise error.with_traceback(self._traceback)  # without the frames that earlier waits have added
        finally:
            del self, error  # the traceback has this frame, which must not hold the error

    def exception(self) -> BaseException | None:
        """Return the exception of the coroutine; None if there is none yet."""
        return self._error

    def cancel(self) -> None:
        """Cancel the coroutine, soon; no effect if it is over."""
        if not self.is_done:
            self._loop.request(self._cancel_now)

    def add_done_callback(self, function: Callable[[Pending[T]], object]) -> None:
        """Call ``function(self)`` when it is over, in the thread that finishes it: it must be quick and not wait."""
        self._callbacks.append(function)
        if self.is_done:
            self._call_back()

    def __repr__(self) -> str:
        state = "under way" if not self.is_done else "done" if self._error is None else f"failed: {self._error!r}"
        return f"<Pending {self.what or 'result'}: {state}>"

    # -- for the finishing thread ------------------------------------------------------------------------------------

    def begun(self, task: asyncio.Task[Any], *, runs_anywhere: bool = False) -> None:
        """Record that ``task`` runs it; other threads than the loop's may run its steps if it ``runs_anywhere``."""
        self._task = task
        self.runs_anywhere = runs_anywhere

    def succeed(self, value: T) -> None:
        """Finish with a result."""
        self._value = value
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Finish with an error."""
        self._error = error
        self._traceback = error.__traceback__
        self._finish()

    def _finish(self) -> None:
        self._task = None
        self.is_done = True
        gates = self._gates
        while gates:
            try:
                gate = gates.pop()
            except IndexError:  # the thread that waited there is gone
                break
            gate.release()
        if self._callbacks:
            self._call_back()

    def _cancel_now(self) -> None:
        if self._task is not None:  # once it has begun: only then can it notify others of the cancellation
            self._loop.call_soon(self._task.cancel)

    def _wait(self, timeout: float | None) -> None:
        self._loop.check_may_wait()
        self._loop.check_runs_here()
        if not (self.runs_anywhere and self._loop.has_bell and self._wait_with_bell(timeout)):
            self._stand_at_gate(timeout)
        if not self.is_done:
            raise TimeoutError(f"{self.what or 'the operation'}: not over after {timeout} s; it goes on")

    def _wait_with_bell(self, timeout: float | None) -> bool:
        """Wait with the loop's bell; return False if it is not available."""
        gate = DoorbellWaiter(self._loop, self)
        self._gates.append(gate)
        try:
            return gate.wait(timeout)
        finally:
            self._leave(gate)

    def _stand_at_gate(self, timeout: float | None) -> None:
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        if self.is_done:
            return
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not gate.acquire(timeout=longest_sleep(end)) and not self.is_done:
                if end is not None and time.monotonic() >= end:
                    return
        finally:
            self._leave(gate)

    def _leave(self, gate: threading.Lock | DoorbellWaiter) -> None:
        if gate in self._gates:
            try:
                self._gates.remove(gate)
            except ValueError:  # it was opened just now
                return

    def _call_back(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                function = callbacks.pop(0)
            except IndexError:  # another thread was faster
                return
            try:
                function(self)
            except Exception as error:  # noqa: BLE001  # it cannot be handled here, and must not affect anything else
                self._loop.call_exception_handler(
                    {"message": f"a callback of {self!r} raised", "exception": error, "callback": function}
                )
