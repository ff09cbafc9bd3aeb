"""The event loop of a blocking program: in a thread of its own, started at first use, ended at exit."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from asyncpar.blocking.caller_runs_loop import FORKED, CallerRunsLoop
from asyncpar.blocking.coroutines import end_tasks, forget_frames, go_far, runs_anywhere
from asyncpar.blocking.pending import Cancelled, Pending
from asyncpar.errors import AsyncparError, PeerTimeout, UsageError

T = TypeVar("T")
MakeCoroutine = Callable[[], Coroutine[Any, Any, T]]

CLOSING_SECONDS = 5.0
"""Seconds that the end waits for resources to close in good order."""

_PATIENCE = 5.0
"""Seconds after its timeout that an operation may take to end; after that the loop counts as blocked."""


class LoopThread:
    """An event loop in a daemon thread called ``name``, on which blocking code runs coroutines.

    Coroutines begin in the order of the calls, whichever threads they come from, in the context (``contextvars``) of
    their callers.  A call that its thread can complete while the loop is idle needs no thread switch: see
    ``caller_runs_loop``.
    """

    def __init__(self, name: str = "asyncpar loop") -> None:
        self.loop = CallerRunsLoop()
        self.is_abandoned = False
        """Whether this is a child of a fork, which has no such thread."""
        self._is_closed = False
        self._is_ending = False
        self._has_ended = False
        self._closing = threading.Lock()
        self._closers: dict[object, MakeCoroutine[object]] = {}
        self._running: dict[asyncio.Task[Any], Pending[Any]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _threads.append(self)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def start(
        self, make: MakeCoroutine[T], *, at_once: bool = False, timeout: float | None = None, what: str = ""
    ) -> Pending[T]:
        """Begin the coroutine that ``make`` returns, and return its pending result; never waits.

        With ``at_once`` it runs as far as possible in this thread, for a caller that waits for the result next.  After
        ``timeout`` seconds it is cancelled and raises ``PeerTimeout`` if a rank is known to be the cause, else
        ``TimeoutError``.  ``what`` names it in messages.
        """
        pending: Pending[T] = Pending(self.loop, what)
        try:
            self._request(make, pending, at_once, timeout)
        except BaseException:  # from a signal: no thread will get the result
            pending.cancel()
            raise
        return pending

    def call(self, make: MakeCoroutine[T], *, timeout: float | None = None, what: str = "") -> T:
        """Run the coroutine that ``make`` returns, and wait for its result; see ``start``.

        An exception that ends the wait, such as that of a signal, cancels it, and so does the end of ``timeout``
        seconds.  ``what`` names the call in messages.
        """
        self.loop.check_may_wait()
        pending: Pending[T] = Pending(self.loop, what)
        try:
            self._request(make, pending, True, timeout)
            return pending.wait(None if timeout is None else timeout + _PATIENCE)
        finally:
            pending.cancel()
            del pending  # it has the error whose traceback has this frame

    def do(self, function: Callable[[], T]) -> T:
        """Call ``function`` as if on the loop, and return its result."""
        self.loop.check_may_wait()
        pending: Pending[T] = Pending(self.loop)
        try:
            self._check_open()
            self.loop.request(partial(self._do, contextvars.copy_context(), function, pending))
            return pending.wait()
        finally:
            del pending

    def check_may_wait(self) -> None:
        """Raise ``UsageError`` in code that the loop runs, which would wait for itself."""
        self.loop.check_may_wait()

    def at_close(self, owner: object, close: MakeCoroutine[object]) -> None:
        """Await the coroutine of ``close`` when the thread ends, unless ``forget(owner)`` was called before."""
        self._closers[owner] = close

    def forget(self, owner: object) -> None:
        """Remove ``owner``, which has been closed."""
        self._closers.pop(owner, None)

    def close(self) -> None:
        """Close open resources, within ``CLOSING_SECONDS``, cancel the rest, and end the thread.  Idempotent."""
        self.loop.check_may_wait()
        with self._closing:
            if not self._is_closed:
                self._close()

    def abandon(self) -> None:
        """Record that this is the child of a fork, which has no such thread."""
        self._is_closed = self.is_abandoned = True
        self._closing = threading.Lock()
        self.loop.abandon()

    # -- on the loop, or as its visitor: must not raise --------------------------------------------------------------

    def _request(self, make: MakeCoroutine[T], pending: Pending[T], at_once: bool, timeout: float | None) -> None:
        self._check_open()
        context = contextvars.copy_context()
        self.loop.request(lambda: self._begin(context, make, pending, at_once, timeout))

    def _begin(
        self,
        context: contextvars.Context,
        make: MakeCoroutine[T],
        pending: Pending[T],
        at_once: bool,
        timeout: float | None,
    ) -> None:
        is_light = False
        try:
            if self._has_ended:
                raise Cancelled("the loop's thread has ended")
            coroutine = context.run(make)
            is_light = runs_anywhere(coroutine)
            if at_once and is_light:
                coroutine, is_over, value = context.run(go_far, coroutine)
                if is_over:
                    pending.succeed(value)
                    return
            task = self.loop.create_task(coroutine, context=context)
        except BaseException as error:  # noqa: BLE001  # the thread that waits for it gets it
            if is_light:
                forget_frames(error)
            pending.fail(error)
            return
        pending.begun(task, runs_anywhere=is_light)
        self._running[task] = pending
        if timeout is not None:
            deadline = self.loop.call_later(timeout, _expire, task, pending, timeout)
            task.add_done_callback(lambda _: deadline.cancel())
        task.add_done_callback(self._settle)
        del task, coroutine  # see ``forget_frames``
        if at_once and is_light:
            self.loop.run_steps(pending)

    def _do(self, context: contextvars.Context, function: Callable[[], T], pending: Pending[T]) -> None:
        try:
            if self._has_ended:
                raise Cancelled("the loop's thread has ended")
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  # the thread that waits for it gets it
            pending.fail(error)
        else:
            pending.succeed(value)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        pending = self._running.pop(task)
        if task.cancelled():
            pending.fail(_cancelled(task, pending))
        elif (error := task.exception()) is not None:
            if pending.runs_anywhere:
                forget_frames(error)
            pending.fail(error)
        else:
            pending.succeed(task.result())

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        # held, since it shuts down in the thread that frees its last object, even while the loop uses it
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # absent from the stubs
        try:
            while not self._is_closed:
                with suppress(SystemExit, KeyboardInterrupt):  # from a coroutine: its caller gets it
                    loop.run_forever()
            self._is_ending = True
            loop.run_until_complete(end_tasks(CLOSING_SECONDS))
        finally:
            self._is_closed = True
            with loop.turn:
                self._has_ended = True
                self._fail_running()
                grpc.aio.shutdown_grpc_aio()  # type: ignore[attr-defined]  # absent from the stubs
                loop.close()
            loop.request(_nothing)  # requests that came too late learn of the end

    def _close(self) -> None:
        closers = [*self._closers.values()]
        try:
            if closers:
                with suppress(AsyncparError, TimeoutError):  # its ranks may be gone; no caller is left to notify
                    self.call(lambda: _await_all(closers), timeout=CLOSING_SECONDS)
        finally:
            self._is_closed = True
            atexit.unregister(self.close)
            if self in _threads:
                _threads.remove(self)
            with suppress(RuntimeError):  # it has ended by itself
                self.loop.call_soon_threadsafe(self._stop)
            self._thread.join(2 * CLOSING_SECONDS)
            if self._thread.is_alive():  # something blocks the loop: do not wait for it
                self._fail_running()

    def _stop(self) -> None:
        if not self._is_ending:
            self.loop.stop()

    def _fail_running(self) -> None:
        for pending in [*self._running.values()]:
            pending.fail(Cancelled("the loop's thread has ended"))

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"start: {FORKED if self.is_abandoned else 'the loop has ended; make a new node'}")


def _expire(task: asyncio.Task[Any], pending: Pending[Any], seconds: float) -> None:
    pending.expired_after = seconds
    task.cancel(TimeoutError(f"its timeout of {seconds:g} s has passed"))


def _cancelled(task: asyncio.Task[Any], pending: Pending[Any]) -> Exception:
    """Return the exception for the thread that waits for ``task``, which was cancelled."""
    try:
        task.result()
    except asyncio.CancelledError as error:
        reason, missing = str(error), getattr(error, "missing_ranks", None)
    what = pending.what or "the call"
    if pending.expired_after is None:
        return Cancelled(f"{what} was cancelled" + (f": {reason}" if reason else ""))
    message = f"{what}: not over within its timeout of {pending.expired_after} s" + (f": {reason}" if reason else "")
    if missing is None:
        return TimeoutError(message)
    rank = missing[0] if missing else None
    return PeerTimeout(message, rank=rank, operation=what, cause="it did not do its part in time")


async def _await_all(closers: list[MakeCoroutine[object]]) -> None:
    await asyncio.gather(*(close() for close in closers), return_exceptions=True)


def _nothing() -> None:
    """Do nothing: the request only makes the queue be served."""


_lock = threading.Lock()
_background: LoopThread | None = None
_threads: list[LoopThread] = []
"""The threads that have not been closed."""

_is_fork = False
"""Whether this process was forked from one with such threads."""


def background() -> LoopThread:
    """Return the loop thread of this process, which has only one, since all gRPC of a process belongs to one loop."""
    global _background  # noqa: PLW0603
    with _lock:
        if _background is None or _background.is_closed:
            if _is_fork:
                raise UsageError(f"start: {FORKED}")
            _background = LoopThread()
            atexit.register(_background.close)
        return _background


def _forget_threads() -> None:
    """Forget the threads in the child of a fork; the objects stay, since closing them would disturb the parent."""
    global _lock, _is_fork  # noqa: PLW0603
    _lock = threading.Lock()
    for thread in _threads:
        _is_fork = True
        thread.abandon()


if hasattr(os, "register_at_fork"):  # where processes can fork
    os.register_at_fork(after_in_child=_forget_threads)
