"""Records of training steps in the event ring: one event per step, with the rank's own time in it.

Theory of operation.  Collectives of a step run while the rank computes, and are matched by name; so the time between
them does not reveal which rank holds up the others.  The trainer knows: time is the rank's own until its last gradient
is final, and then it waits for the others.  The time between two steps is its own, too, except for the collectives in
it, which are read from the ring once a step.  An event covers a whole step of the synchronizer or trainer; its
``nbytes`` are the microseconds of own time since the end of the step before, its ``sequence`` is the number of the
step.

Steps nest: a trainer's step contains that of its synchronizer.  The outer one is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import EventKind, EventState

_MOST_BETWEEN: Final = 256
"""Most events between two steps that are examined."""

_WAITS: Final = frozenset((EventKind.COLLECTIVE, EventKind.RECEIVE))


class StepMeter:
    """Records the steps of one synchronizer or trainer, called ``name``, of the ranks of ``group``.

    ``group`` is the number of the world's group if all ranks take the steps, else 0: such steps are not compared.  A
    step is ``begin``, ``works`` and ``waits`` in turn, and ``end``; ``waits`` may be called in any thread.
    """

    def __init__(self, recorder: Recorder, name: str, *, group: int) -> None:
        self._recorder = recorder
        self._name = name
        self._group = group
        self._ticket = NO_TICKET
        self._own = 0.0
        self._works_since: float | None = None

    def begin(self, number: int) -> None:
        """Begin step ``number``, which is the same on all ranks; until ``works`` the rank waits for others."""
        self.end(EventState.CANCELLED)
        recorder = self._recorder
        if recorder.is_closed or (recorder.step is not None and recorder.step() is not None):
            return
        recorder.step = weakref.ref(self)
        word = recorder.name(self._name)
        self._ticket = recorder.begin(EventKind.STEP, word, group=self._group, sequence=number)
        self._own = self._between(recorder.stepped_at, recorder.clock())
        self._works_since = None

    def works(self) -> None:
        """Count the time from now on as the rank's own."""
        self._works_since = self._recorder.clock()

    def waits(self) -> None:
        """Count the time from now on as waiting for others.  Idempotent."""
        since, self._works_since = self._works_since, None
        if since is not None:
            self.add(self._recorder.clock() - since)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for others, and the time after it as the rank's own."""
        self.waits()
        try:
            yield
        finally:
            self.works()

    def add(self, seconds: float) -> None:
        """Count ``seconds`` as the rank's own."""
        self._own += max(0.0, seconds)

    def end(self, state: EventState = EventState.COMPLETED) -> None:
        """End the step.  Idempotent."""
        self.waits()
        ticket, self._ticket = self._ticket, NO_TICKET
        recorder = self._recorder
        if recorder.step is None or recorder.step() is not self:
            return
        recorder.step = None
        recorder.stepped_at = recorder.clock()
        if ticket != NO_TICKET:
            recorder.measure(ticket, round(self._own * 1e6))
            recorder.end(ticket, state)

    def record(self, number: int, *, own: float, since: float) -> None:
        """Record step ``number``, which is over, began at ``since`` and had ``own`` seconds of the rank's own."""
        recorder = self._recorder
        if recorder.is_closed or (recorder.step is not None and recorder.step() is not None):
            return
        nbytes = round(max(0.0, own) * 1e6)
        word = recorder.name(self._name)
        ticket = recorder.begin(EventKind.STEP, word, group=self._group, sequence=number, nbytes=nbytes)
        recorder.backdate(ticket, since)
        recorder.end(ticket)
        recorder.stepped_at = recorder.clock()

    def _between(self, start: float | None, stop: float) -> float:
        """Return the own time between two steps: all but the collectives and receives that began in it."""
        if start is None:
            return 0.0
        before = self._recorder.before(self._ticket, most=_MOST_BETWEEN, since=start)
        waits = sorted((created, ended) for kind, created, ended in before if kind in _WAITS and ended)
        own, until = stop - start, start
        for created, ended in waits:  # the time before ``until`` is already counted
            own -= max(0.0, min(ended, stop) - max(created, until))
            until = max(until, ended)
        return max(0.0, own)
