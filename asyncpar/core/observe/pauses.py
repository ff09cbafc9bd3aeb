"""Record what takes time from a rank without being its program: garbage collections, and others on its processor.

Collections of the oldest generation are spans; younger ones take less than a millisecond.  The time for which the
thread of the event loop could have run and did not is sampled: an event at the end of the time that was looked at, with
so many microseconds in its ``nbytes``, and the length of that time, in microseconds, in its ``sequence``.
"""

from __future__ import annotations

import gc
import threading
from typing import Final

from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind

COLLECTION: Final = "asyncpar: garbage collection"
TAKEN: Final = "asyncpar: processor taken"

_LEAST_TAKEN: Final = 0.0005
_OLDEST: Final = 2


class PauseRecorder:
    """Records pauses of one node from ``start``, which is called in the thread of its loop, to ``stop``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._collection = recorder.name(COLLECTION)
        self._taken = recorder.name(TAKEN)
        self._ticket: int | None = None
        self._waits = ""
        self._waited = 0
        self._sampled_at = 0.0

    def start(self) -> None:
        """Begin to record."""
        self._waits = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._waited = self._read_waited()
        self._sampled_at = self._recorder.clock()
        gc.callbacks.append(self._collecting)

    def stop(self) -> None:
        """Record no more.  Idempotent."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def sample(self) -> float:
        """Record for how long the loop's thread has waited for a processor since the last call; return the seconds.

        From any thread, a few times a second.
        """
        before, self._waited = self._waited, self._read_waited()
        taken = max(0, self._waited - before) * 1e-9
        now = self._recorder.clock()
        period, self._sampled_at = now - self._sampled_at, now
        if taken >= _LEAST_TAKEN:
            micros = (int(taken * 1e6), int(period * 1e6))
            self._recorder.end(self._recorder.begin(EventKind.SPAN, self._taken, nbytes=micros[0], sequence=micros[1]))
        return taken

    def _collecting(self, phase: str, details: dict[str, int]) -> None:
        if details.get("generation") != _OLDEST:
            return
        if phase == "start":
            self._ticket = self._recorder.begin(EventKind.SPAN, self._collection)
        elif self._ticket is not None:
            self._recorder.end(self._ticket)
            self._ticket = None

    def _read_waited(self) -> int:
        """Return the nanoseconds for which the thread has waited so far; 0 where the system does not say."""
        try:
            with open(self._waits, "rb") as file:
                return int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
