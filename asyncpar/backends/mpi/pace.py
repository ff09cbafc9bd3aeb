"""How often to look for messages where nothing announces them.  Pure."""

from __future__ import annotations

SPIN_SECONDS = 0.003
"""Look again at once for so long after something has moved."""

_SHARE = 1 / 8
LONGEST_NAP = 0.005


class Pace:
    """Look again at once while messages move; after that, sleep for an eighth of the time that nothing has moved.

    So a message that comes late comes an eighth later still, at most and up to 5 ms, and a rank that waits for nothing
    looks 200 times a second, which takes one or two hundredths of a core.
    """

    def __init__(self, now: float) -> None:
        self._moved_at = now

    def moved(self, now: float) -> None:
        """Something was sent or has arrived."""
        self._moved_at = now

    def nap(self, now: float) -> float:
        """Return for how many seconds to sleep before looking again; 0: not at all."""
        idle = now - self._moved_at
        return 0.0 if idle < SPIN_SECONDS else min(_SHARE * idle, LONGEST_NAP)
