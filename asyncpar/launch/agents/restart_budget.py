"""The crashes that a slot may have, and its delay before it starts again.  Pure."""

from __future__ import annotations

from collections import deque

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 30.0


class RestartBudget:
    """Counts crashes of each slot of a host: ``most`` of each within ``window`` seconds are followed by a start."""

    def __init__(self, *, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._crashes: dict[int, deque[float]] = {}

    def crashes(self, slot: int) -> int:
        """Return how often ``slot`` has crashed within the window that ended with its last crash."""
        return len(self._crashes.get(slot, ()))

    def crash(self, slot: int, now: float) -> float | None:
        """Count a crash of ``slot``; return after how many seconds it is to start again, None: not any more."""
        known = self._crashes.setdefault(slot, deque())
        known.append(now)
        while known[0] <= now - self.window:
            known.popleft()
        if len(known) > self.most:
            return None
        return float(min(_FIRST_WAIT * 2 ** (len(known) - 1), _LONGEST_WAIT))
