"""Warnings of a rank's operations that wait for long, and what agents tell of the ranks that they wait for."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asyncpar.core.observe.reporting import Reporter
from asyncpar.core.observe.waits import WaitNotice
from asyncpar.errors import UsageError

WAIT_WARNING: Final = "ASYNCPAR_WAIT_WARNING"
"""The variable with the seconds after which an operation that waits is told."""

WAIT_SECONDS: Final = 10.0
_LONGEST: Final = 24 * 3600.0
_LOG: Final = logging.getLogger("asyncpar.runtime")


def parse_wait_warning(text: str | None) -> float | None:
    """Return after how many seconds waiting is told: what the setting says, 10 without it, None for ``off``.

    Raises ``UsageError`` for anything but ``off`` and seconds from 0.1 to a day.
    """
    if not text:
        return WAIT_SECONDS
    if text == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= _LONGEST:
        raise UsageError(f"{WAIT_WARNING}: expected seconds from 0.1 to {_LONGEST:.0f}, or off, got {text!r}")
    return seconds


MOST_TOLD: Final = 8
"""Operations that are told at the same time; thousands may wait for the same rank."""


class RankObserver:
    """One per rank.  Waiting is told after ``warn_after`` seconds (None: never): to the agent, else in the log.

    ``find_program`` says where the rank's program is (``is in user code at train.py:57``), "" if that is not known.
    """

    def __init__(self, rank: int) -> None:
        self.warn_after: float | None = WAIT_SECONDS
        self.find_program: Callable[[], str] = str
        self.conditions: dict[int, str] = {}
        """By rank: what agents say of ranks that cannot answer themselves: ``is stopped``."""
        self.reporter = Reporter(None)
        self._rank = rank
        self._waiting: dict[object, WaitNotice] = {}

    @property
    def is_crowded(self) -> bool:
        """Have so many operations been told that more would say nothing new?"""
        return len(self._waiting) >= MOST_TOLD

    def told(self, operation: object) -> WaitNotice | None:
        """Return what was told of an ``operation`` that is not over; None if it was not.  From any thread."""
        return self._waiting.get(operation)

    def tell_waiting(self, operation: object, notice: WaitNotice) -> None:
        """Tell, once, that ``operation`` has waited for long.

        The agent's launcher tells what all ranks wait for; without one it is a warning.
        """
        self._waiting[operation] = notice
        self._log(f"{notice}")
        self._report()

    def tell_over(self, operation: object, *, has_failed: bool) -> None:
        """Tell that ``operation``, which has waited for long, is over; if it ``has_failed``, its error tells more."""
        notice = self._waiting.pop(operation, None)
        if notice is not None:
            if not has_failed:
                self._log(f"{notice.operation} goes on")
            self._report(has_failed=has_failed)

    @contextmanager
    def telling(self, look: Callable[[float], WaitNotice]) -> Iterator[None]:
        """Tell if what is done inside takes long; ``look`` gets the seconds, and returns what is told then."""
        if self.warn_after is None:
            yield
            return
        operation, seconds = object(), self.warn_after
        timer = asyncio.get_running_loop().call_later(seconds, lambda: self.tell_waiting(operation, look(seconds)))
        try:
            yield
        except BaseException:
            self.tell_over(operation, has_failed=True)
            raise
        finally:
            timer.cancel()
            self.tell_over(operation, has_failed=False)

    def _log(self, text: str) -> None:
        level = logging.INFO if self.reporter.is_connected else logging.WARNING
        _LOG.log(level, "rank %d: %s", self._rank, text)

    def _report(self, *, has_failed: bool = False) -> None:
        """Report the wait that began first; the others may come of it.

        Those for a certain rank come before those for any.  Asks come last: what they wait for does so.
        """
        first = min(
            self._waiting.values(), key=lambda notice: (bool(notice.actor), notice.culprit is None), default=None
        )
        self.reporter.waiting(first, has_failed=has_failed)

    def hear_condition(self, rank: int, how: str) -> None:
        """Take what an agent says of ``rank``; "": it runs."""
        if how:
            self.conditions[rank] = how
        else:
            self.conditions.pop(rank, None)
