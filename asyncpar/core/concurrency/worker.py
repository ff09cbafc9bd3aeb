"""Functions that block or compute for long, run in threads and awaited on the event loop.

``WorkerThread`` is for work on memory that is reused: its caller waits for the end of the function even when cancelled,
and so does the interpreter at exit.  ``DaemonThread`` is for calls that may never return: a cancelled caller returns at
once, and the thread does not keep the program from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

from asyncpar.core.concurrency.bridge import LoopBridge

T = TypeVar("T")
Args = TypeVarTuple("Args")

ENDS_PROGRAM: Final = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that end the program or its tasks; they are not failures of the function that they pass through."""


class Once(Generic[T]):
    """One call of ``work`` in a thread, which releases it before the result is announced.

    The thread of an executor keeps a reference to its last work for some time after that; so objects that the work
    refers to, such as a synchronizer, would seem to be still in use after their last user is gone.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work

    def __call__(self) -> T:
        work, self._work = self._work, None
        assert work is not None, "it has run"
        return work()


class WorkerThread:
    """One thread (or ``threads``), started by the first call, that runs functions in the order of the calls.

    Functions see the context variables of their callers.  Those that wait for peers do so through ``bridge``.
    """

    __slots__ = ("_bridge", "_executor", "_name", "_threads")

    def __init__(self, name: str, bridge: LoopBridge | None = None, *, threads: int = 1) -> None:
        self._name = name
        self._bridge = bridge
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run ``function`` in the thread and return its result, or raise its exception.

        A thread cannot be stopped: a cancelled caller is kept until ``function`` has ended, because the memory that it
        writes to, such as gradients, may be reused after that.  Waits of the function over the bridge are interrupted,
        so that it ends soon; call ``resume`` of the bridge before using it again.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        running = asyncio.get_running_loop().run_in_executor(
            self._executor, copy_context().run, _outcome, Once(partial(function, *args))
        )
        interrupt = None if self._bridge is None else self._bridge.interrupt
        value, failure = await until_done(running, on_cancel=interrupt)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]  # T, when there is no failure

    def close(self) -> None:
        """Accept no more calls and drop those that have not begun.  Does not wait; a running function goes on."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


async def until_done(running: asyncio.Future[T], on_cancel: Callable[[], object] | None = None) -> T:
    """Return the result of ``running``, which is never cancelled; a cancelled caller is kept until it is done.

    Each cancellation calls ``on_cancel``.  Raises ``CancelledError`` in the end, and drops the result or error.
    """
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is None:
        return running.result()
    if not running.cancelled():
        running.exception()  # retrieved: nothing else reads it
    raise cancelled


class DaemonThread:
    """A daemon thread that runs functions in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the thread and return its result, or raise its exception.  Cancelled, return at once."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((function, result))
        return await result

    def close(self, *, patience: float = 0.0) -> None:
        """End the thread after the calls made so far.  Waits at most ``patience`` seconds for that."""
        self._calls.put(None)
        if patience > 0.0:
            self._thread.join(patience)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, result = call
            outcome = _outcome(function, also_ends=True)
            try:
                result.get_loop().call_soon_threadsafe(_settle, result, *outcome)
            except RuntimeError:  # the loop is closed: nothing waits for the result
                continue
            finally:
                del call, function, result, outcome  # so that they do not live on while the thread is idle


async def call_in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Run ``function`` in a new daemon thread called ``name`` and return its result.  Returns at once if cancelled."""
    thread = DaemonThread(name)
    try:
        return await thread.run(function)
    finally:
        thread.close()


def _outcome(function: Callable[[], T], also_ends: bool = False) -> tuple[T | None, BaseException | None]:
    """Call ``function`` and return (value, None) or (None, error): some exceptions cannot pass through a future."""
    try:
        return function(), None
    except ENDS_PROGRAM as error:
        if also_ends:
            return None, error
        raise
    except BaseException as error:  # noqa: BLE001  # raised again where the call is awaited
        return None, error


def _settle(result: asyncio.Future[T], value: T | None, failure: BaseException | None) -> None:
    if result.done():  # its caller was cancelled
        return
    if failure is not None:
        result.set_exception(failure)
    else:
        result.set_result(value)  # type: ignore[arg-type]  # T, when there is no failure
