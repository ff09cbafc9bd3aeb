"""Recording of a rank's pauses outside its program: garbage collections, and competition for its processor.

Collections of the oldest generation are spans; younger ones take less than a millisecond.  The time for which the
busiest thread (that of the event loop, or one that computes) could have run and did not is sampled: an event at the end
of the sampled period, with the lost microseconds in its ``nbytes``, those for which the thread did run in its
``group``, and the length of the period, in microseconds, in its ``sequence``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind

COLLECTION: Final = "asyncpar: garbage collection"
TAKEN: Final = "asyncpar: processor taken"

_THREADS: Final = "/proc/self/task"
_LEAST_TAKEN: Final = 0.0005
_OLDEST: Final = 2


class PauseRecorder:
    """Records pauses of one node from ``start`` to ``stop``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._collection = recorder.name(COLLECTION)
        self._taken = recorder.name(TAKEN)
        self._ticket: int | None = None
        self._threads: dict[str, tuple[int, int]] = {}
        """Nanoseconds for which each thread had run, and waited, at the last sample."""
        self._sampled_at = 0.0

    def start(self) -> None:
        """Start recording."""
        self._threads = _read_threads()
        self._sampled_at = self._recorder.clock()
        gc.callbacks.append(self._collecting)

    def stop(self) -> None:
        """Stop recording.  Idempotent."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def sample(self) -> float:
        """Record how long the busiest thread has waited for a processor since the last call; return the seconds.

        Call it from any thread, a few times a second.  Costs about 10 us per thread.
        """
        before, self._threads = self._threads, _read_threads()
        ran, waited = _find_busiest(before, self._threads)
        taken = waited * 1e-9
        now = self._recorder.clock()
        period, self._sampled_at = now - self._sampled_at, now
        if taken >= _LEAST_TAKEN:
            ticket = self._recorder.begin(
                EventKind.SPAN, self._taken, nbytes=waited // 1000, group=ran // 1000, sequence=int(period * 1e6)
            )
            self._recorder.end(ticket)
        return taken

    def _collecting(self, phase: str, details: dict[str, int]) -> None:
        if details.get("generation") != _OLDEST:
            return
        if phase == "start":
            self._ticket = self._recorder.begin(EventKind.SPAN, self._collection)
        elif self._ticket is not None:
            self._recorder.end(self._ticket)
            self._ticket = None


def _read_threads() -> dict[str, tuple[int, int]]:
    """Return the nanoseconds for which each thread has run, and waited for a processor; none where not known."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir(_THREADS):
            with suppress(OSError), open(f"{_THREADS}/{thread}/schedstat", "rb") as file:  # it may have ended
                ran, waited, _ = file.read().split()
                found[thread] = (int(ran), int(waited))
    return found


def _find_busiest(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the times for which the busiest thread since ``before`` has run, and waited."""
    spent = []
    for thread, (ran, waited) in now.items():
        ran_before, waited_before = before.get(thread, (0, 0))
        spent.append((ran - ran_before, waited - waited_before))
    return max(spent, key=sum, default=(0, 0))
