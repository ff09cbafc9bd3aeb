"""The crashes that a slot, or a host, may have, and its delay before it starts again.  Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Key = TypeVar("Key")

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 30.0


class RestartBudget(Generic[Key]):
    """Counts crashes of each slot: ``most`` of each within ``window`` seconds are followed by a start."""

    def __init__(self, *, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._crashes: dict[Key, deque[float]] = {}

    def crashes(self, slot: Key) -> int:
        """Return how often ``slot`` has crashed within the window that ended with its last crash."""
        return len(self._crashes.get(slot, ()))

    def crash(self, slot: Key, now: float) -> float | None:
        """Count a crash of ``slot``; return after how many seconds it is to start again, None: not now."""
        known = self._crashes.setdefault(slot, deque())
        known.append(now)
        while known[0] <= now - self.window:
            known.popleft()
        if len(known) > self.most:
            return None
        return wait_after(len(known))

    def rested_at(self, slot: Key) -> float | None:
        """Return when ``slot``, which may not start again now, may: its oldest crash counts no more; None: never."""
        return self._crashes[slot][0] + self.window if self.most else None


def wait_after(crashes: int) -> float:
    """Return how many seconds to wait before another start, after so many crashes; they are doubled with each."""
    return float(min(_FIRST_WAIT * 2 ** min(crashes - 1, 30), _LONGEST_WAIT))
