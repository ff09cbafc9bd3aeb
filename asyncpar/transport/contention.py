"""Do others wait for the processors that this process keeps busy?

Theory of operation.  Linux counts the time during which some process could run but had no processor (pressure stall
information).  While this process burns processor time only to be quick, it looks now and then how fast that counter
grows.  If it grows fast there is no processor to spare, so the burning rests for a while, for longer each time, until
it turns out to harm nobody.  Where the system does not count, nothing is ever contended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 0.05
MOST_LOOK_SECONDS: Final = 0.25
"""A longer time between two looks says nothing: most of it this process was not burning."""

MOST_WAITING: Final = 0.5
"""Share of the time in which somebody may wait for a processor."""

LEAST_REST_SECONDS: Final = 0.1
MOST_REST_SECONDS: Final = 2.0

_TOTAL = re.compile(rb"some .*total=(\d+)")
_PRESSURE = Path("/proc/pressure/cpu")


def read_waiting() -> float | None:
    """Return the seconds, since some time, in which a process waited for a processor; None if nobody counts them."""
    try:
        match = _TOTAL.search(_PRESSURE.read_bytes())
    except OSError:
        return None
    return None if match is None else int(match[1]) / 1e6


class Contention:
    """Decides whether processor time may be burnt.  ``read`` is ``read_waiting``, or plays it."""

    def __init__(self, read: Callable[[], float | None] = read_waiting) -> None:
        self._read = read
        self._looked = float("-inf")
        self._waited: float | None = None
        self._rest_until = float("-inf")
        self._rest = LEAST_REST_SECONDS

    def has_to_rest(self, now: float) -> bool:
        """Say whether to burn nothing at time ``now``.  Ask whenever something is burnt: mostly that is cheap."""
        if now < self._rest_until:
            return True
        if now - self._looked < LOOK_SECONDS:
            return False
        waited = self._read()
        before, self._waited = self._waited, waited
        passed, self._looked = now - self._looked, now
        if waited is None or before is None or passed > MOST_LOOK_SECONDS:
            return False
        if waited - before <= MOST_WAITING * passed:
            self._rest = max(self._rest - passed, LEAST_REST_SECONDS)
            return False
        self._waited = None  # how it is while nothing is burnt does not count
        self._rest_until = now + self._rest
        self._rest = min(2 * self._rest, MOST_REST_SECONDS)
        return True
