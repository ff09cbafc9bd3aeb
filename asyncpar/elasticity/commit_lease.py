"""The lease of a process of an elastic job: until when it may commit without asking.

Theory of operation.  The others go on without a host from which nothing was received for a while, and a process that
was stopped, or whose agent was, cannot know for how long.  So it commits only while an answer of its agent is valid:
for the seconds in the answer, counted from the moment of the question, by this process's monotonic clock.  The agent
grants the time in which no one can have declared its host lost.  When half of that has passed the process asks again,
concurrently with its steps, so a step waits for an answer only after a pause, or if it takes longer than a lease.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

_AGAIN_SECONDS = 0.1
"""Seconds from an answer that allows nothing until the next question."""


class CommitLease:
    """``ask`` sends the question; ``grant`` takes its answer."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._asked_at: float | None = None
        self._renew_at = self._until = -math.inf
        self._answered = asyncio.Event()
        self._end: Exception | None = None

    def grant(self, seconds: float) -> None:
        """Take the answer to the last question: commits are allowed for ``seconds`` after it; 0.0: none."""
        asked, self._asked_at = self._asked_at, None
        if asked is not None and seconds > 0.0:
            self._until, self._renew_at = asked + seconds, asked + seconds / 2
        self._answered.set()

    def end(self, error: Exception) -> None:
        """Make ``hold`` raise ``error`` from now on: nothing may be committed any more."""
        self._end = error
        self._answered.set()

    async def hold(self) -> None:
        """Return when a commit is allowed; everything done before the next ``await`` is within the lease."""
        while True:
            if self._end is not None:
                raise self._end
            now = time.monotonic()
            if now >= self._renew_at and self._asked_at is None:
                self._asked_at = now
                self._ask()
            if now < self._until:
                return
            self._answered.clear()
            await self._answered.wait()
            if time.monotonic() >= self._until:
                await asyncio.sleep(_AGAIN_SECONDS)
