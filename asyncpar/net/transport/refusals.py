"""Log messages about refused connections, limited to a few of each kind.  Pure."""

from __future__ import annotations

import math
from typing import Final

PERIOD_SECONDS: Final = 10.0
LINES_PER_PERIOD: Final = 10


class Refusals:
    """Counts refused connections, and decides which ones are logged."""

    def __init__(self) -> None:
        self._began = -math.inf
        self._logged = 0
        self._omitted = 0

    def line(self, error: Exception, *, now: float) -> str | None:
        """Return the log message about a connection that was refused because of ``error``; None for none."""
        if now - self._began >= PERIOD_SECONDS:
            self._began, self._logged = now, 0
        if self._logged >= LINES_PER_PERIOD:
            self._omitted += 1
            return None
        self._logged += 1
        omitted, self._omitted = self._omitted, 0
        return f"a connection was refused: {error}" + (f" (and {omitted} more before it)" if omitted else "")
