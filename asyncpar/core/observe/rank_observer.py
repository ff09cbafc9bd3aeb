"""Warnings about long waits of a rank's operations, and agents' reports on the ranks waited for."""

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
"""The variable with the seconds after which a waiting operation is reported."""

WAIT_SECONDS: Final = 10.0
_LONGEST: Final = 24 * 3600.0
_LOG: Final = logging.getLogger("asyncpar.runtime")


def parse_wait_warning(text: str | None) -> float | None:
    """Return the seconds after which waiting is reported: the setting, 10 without it, None for ``off``.

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


MOST_REPORTED: Final = 8
"""Most operations that are reported at the same time; thousands may wait for the same rank."""


class RankObserver:
    """One per rank.  Waits are reported after ``warn_after`` seconds (None: never): to the agent, else in the log.

    ``find_program`` returns where the rank's program is (``is in user code at train.py:57``), "" if that is not known.
    """

    def __init__(self, rank: int) -> None:
        self.warn_after: float | None = WAIT_SECONDS
        self.find_program: Callable[[], str] = str
        self.conditions: dict[int, str] = {}
        """Agents' reports, by rank, on ranks that cannot answer themselves: ``is stopped``."""
        self.reporter = Reporter(None)
        self._rank = rank
        self._waiting: dict[object, WaitNotice] = {}

    @property
    def is_crowded(self) -> bool:
        """Whether so many operations have been reported that more would add nothing."""
        return len(self._waiting) >= MOST_REPORTED

    def notice_of(self, operation: object) -> WaitNotice | None:
        """Return the report on an ``operation`` that is not over; None if there was none.  From any thread."""
        return self._waiting.get(operation)

    def report_waiting(self, operation: object, notice: WaitNotice) -> None:
        """Report, once, that ``operation`` has waited for long.

        The agent's launcher reports what all ranks wait for; without an agent it is a warning.
        """
        self._waiting[operation] = notice
        self._log(f"{notice}")
        self._report()

    def report_over(self, operation: object, *, has_failed: bool) -> None:
        """Report that ``operation``, which has waited for long, is over; if it ``has_failed``, its error says more."""
        notice = self._waiting.pop(operation, None)
        if notice is not None:
            if not has_failed:
                self._log(f"{notice.operation} goes on")
            self._report(has_failed=has_failed)

    @contextmanager
    def reporting(self, inspect: Callable[[float], WaitNotice]) -> Iterator[None]:
        """Report if the block takes long; ``inspect`` is called with the seconds, and returns the report."""
        if self.warn_after is None:
            yield
            return
        operation, seconds = object(), self.warn_after
        timer = asyncio.get_running_loop().call_later(seconds, lambda: self.report_waiting(operation, inspect(seconds)))
        try:
            yield
        except BaseException:
            self.report_over(operation, has_failed=True)
            raise
        finally:
            timer.cancel()
            self.report_over(operation, has_failed=False)

    def _log(self, text: str) -> None:
        level = logging.INFO if self.reporter.is_connected else logging.WARNING
        _LOG.log(level, "rank %d: %s", self._rank, text)

    def _report(self, *, has_failed: bool = False) -> None:
        """Report the wait that began first; the others may result from it.

        Waits for a certain rank come before those for any.  Asks come last: the actors that they wait for wait, too.
        """
        first = min(
            self._waiting.values(), key=lambda notice: (bool(notice.actor), notice.culprit is None), default=None
        )
        self.reporter.waiting(first, has_failed=has_failed)

    def record_condition(self, rank: int, how: str) -> None:
        """Record an agent's report on ``rank``; "": it runs."""
        if how:
            self.conditions[rank] = how
        else:
            self.conditions.pop(rank, None)
