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
        self._told = 0
        self._untold = 0

    def line(self, error: Exception, *, now: float) -> str | None:
        """Return the log message about a connection that was refused because of ``error``; None for none."""
        if now - self._began >= PERIOD_SECONDS:
            self._began, self._told = now, 0
        if self._told >= LINES_PER_PERIOD:
            self._untold += 1
            return None
        self._told += 1
        untold, self._untold = self._untold, 0
        return f"a connection was refused: {error}" + (f" (and {untold} more before it)" if untold else "")
