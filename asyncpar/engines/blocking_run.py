"""Wait for a job in blocking code: a script, a test, or a cell of a notebook, where an event loop runs already."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from asyncpar.core.concurrency.tasks import new_loop

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_SECONDS = 0.2
"""The longest sleep of the main thread, in seconds: a signal that arrives as it falls asleep is handled after that."""


def make_run(
    launch: Callable[P, Coroutine[Any, Any, T]], *, check: Callable[P, object] | None = None
) -> Callable[P, T]:
    """Return the ``run`` of an engine: it waits, and has the parameters and the documentation of ``launch``.

    ``check`` is called with the arguments first, in the caller's thread.
    """

    @functools.wraps(launch, assigned=("__module__",))
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as ``launch``, with the same parameters, and wait; Ctrl-C ends all ranks.

        It also works where an event loop runs, as in a notebook.
        """
        if check is not None:
            check(*args, **kwargs)
        return run_in_thread(lambda: launch(*args, **kwargs))

    run.__qualname__ = launch.__qualname__.removesuffix("launch") + "run"
    run.__doc__ = f"{inspect.getdoc(run)}\n\n{inspect.getdoc(launch)}"
    return run


def run_in_thread(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that ``make`` returns on an event loop in a thread of its own, and return its result.

    Each ``KeyboardInterrupt`` cancels it; the exception is raised when the coroutine has ended.
    """
    work = _JobThread(make)
    interrupt: KeyboardInterrupt | None = None
    while not work.has_ended.is_set():
        try:
            work.has_ended.wait(_LOOK_SECONDS)
        except KeyboardInterrupt as error:
            interrupt = error
            work.cancel()
    work.thread.join()
    if interrupt is not None:
        raise interrupt
    result: T = work.result()
    return result


class _JobThread:
    """A coroutine in a thread."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.has_ended = threading.Event()
        self._make = make
        self._value: Any = None
        self._error: BaseException | None = None
        self._cancels = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        context = contextvars.copy_context()  # kernels of notebooks identify the printing cell by it
        self.thread = threading.Thread(target=context.run, args=(self._run,), name="asyncpar job", daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        with self._lock:
            if self._loop is None or self._task is None:
                self._cancels += 1
            elif not self.has_ended.is_set():
                self._loop.call_soon_threadsafe(self._task.cancel)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                self._value = runner.run(self._main())
        except BaseException as error:  # noqa: BLE001  # it is raised in the thread that waits
            self._error = error
        finally:
            with self._lock:
                self.has_ended.set()

    async def _main(self) -> Any:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._cancels and self._task is not None:
                self._task.cancel()
        try:
            return await self._make()
        finally:
            with self._lock:
                self._task = None
