"""A time limit that also holds when the event loop no longer runs.

Theory of operation.  A thread waits for the limit.  Then it asks the loop to cancel the watched task, with a report
that is made on the loop; if the loop does not answer, because code blocks it, the thread makes the report, and
interrupts the main thread by a signal whose handler raises.  Code that does not end by that is interrupted again.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from asyncpar.errors import AsyncparError

ANSWER_SECONDS: Final = 1.0
"""Seconds that the loop may take to answer."""

GRACE_SECONDS: Final = 5.0
"""Seconds that a cancelled world may take to end before the main thread is interrupted."""


class WorldHung(AsyncparError, TimeoutError):  # noqa: N818
    """A test's world did not end in time; the message has the waits between its ranks, and the tasks of each."""


class Watchdog:
    """Watches the task in which it is made until ``stop``.  ``hung`` is the error, once the limit has passed.

    ``describe`` makes the report.
    """

    def __init__(self, seconds: float, what: str, describe: Callable[[], str]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.hung: WorldHung | None = None
        self._task: asyncio.Task[Any] = task
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._what = what
        self._describe = describe
        self._answered = threading.Event()
        self._over = threading.Event()
        self._is_interrupting = False
        self._is_main = threading.current_thread() is threading.main_thread()
        self._before: Any = signal.signal(signal.SIGALRM, self._receive_signal) if self._is_main else None
        self._thread = threading.Thread(target=self._watch, name="asyncpar watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching.  Idempotent."""
        self._over.set()
        self._thread.join()
        if self._is_main and self._before is not None:
            signal.signal(signal.SIGALRM, self._before)
            self._before = None

    def _watch(self) -> None:
        if self._over.wait(self._seconds):
            return
        self._loop.call_soon_threadsafe(self._expire)
        if not self._answered.wait(ANSWER_SECONDS):
            self.hung = self._make_error()
        elif self._over.wait(GRACE_SECONDS):
            return
        while self._is_main and not self._over.is_set():
            self._is_interrupting = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            self._over.wait(GRACE_SECONDS)

    def _expire(self) -> None:
        """Cancel the task: the loop runs."""
        if not self._over.is_set():
            self.hung = self.hung or self._make_error()
            self._answered.set()
            self._task.cancel()

    def _make_error(self) -> WorldHung:
        return WorldHung(f"{self._what} did not end within {self._seconds:g} s\n{self._describe()}")

    def _receive_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_interrupting and self.hung is not None:
            self._is_interrupting = False
            raise self.hung
        if callable(self._before):  # another library's alarm, such as that of pytest-timeout
            self._before(number, frame)
