"""``ap.observe.report``: reports of the program's figures to the launcher, its page and its sinks."""

from __future__ import annotations

import time
from typing import Final, SupportsFloat

from asyncpar.core.observe.reported import reported
from asyncpar.core.observe.reporting import process_reporter
from asyncpar.errors import UsageError

_SHOW_SECONDS: Final = 0.1


class _Shower:
    """Passes values on to the launcher's progress line, at most ten times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self) -> None:
        """Show the progress with the latest values, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SHOW_SECONDS
        progress, reporter = reported.progress, process_reporter()
        if progress is not None and reporter.is_connected:
            description, completed, total = progress
            reporter.show_values(description=description, completed=completed, total=total)


_shower: Final = _Shower()


def report(**values: SupportsFloat) -> None:
    """Report figures of this rank, such as ``report(loss=2.31, lr=3e-4)``; the latest of each name counts.

    They are in the launcher's progress line (of the lowest rank that reports), on the page of ``asyncpar launch
    --dashboard``, and in sinks.  A call takes microseconds, and is thread-safe.  Programs that show no progress are
    counted by their reports.  Raises ``UsageError`` for values that are not numbers, and for more than 32 names.
    """
    if not values:
        raise UsageError("report: expected at least one value, such as report(loss=2.31)")
    reported.take(values)
    _shower.show()
