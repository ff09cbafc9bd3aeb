"""Threads in which torch's futures are completed.

Completing a future runs its callbacks, which may take long, call collectives and wait for them.  On the event loop that
would wait for itself; so it happens in threads of its own: one, and another whenever all are busy, so that a callback
may also wait for another future.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""After so long without work a thread ends."""


class Completions:
    """Runs functions in daemon threads, as many as there are functions that have not returned."""

    def __init__(self, name: str = "asyncpar completions") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, function: Callable[[], object]) -> None:
        """Run ``function`` soon; never waits."""
        with self._lock:
            self._queue.put(function)
            if self._idle:
                self._idle -= 1
                return
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                function = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._idle -= 1
                        return
                    continue
            try:
                function()
            except Exception:  # noqa: BLE001  # torch gives errors of callbacks to their futures; this is what is left
                _log.exception("a callback of a future failed")
            del function  # what it holds is not to live until the next one comes
            with self._lock:
                self._idle += 1
