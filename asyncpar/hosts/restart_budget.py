"""The crashes allowed to a slot, or a host, and its delay before it starts again.  Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Key = TypeVar("Key")

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 30.0


class RestartBudget(Generic[Key]):
    """Counts crashes of each slot: up to ``most`` within ``window`` seconds are followed by a restart."""

    def __init__(self, *, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._crashes: dict[Key, deque[float]] = {}

    def crashes(self, slot: Key) -> int:
        """Return the number of crashes of ``slot`` within the window that ended with its last crash."""
        return len(self._crashes.get(slot, ()))

    def crash(self, slot: Key, now: float) -> float | None:
        """Count a crash of ``slot``; return the seconds after which it is to start again, None: not now."""
        known = self._crashes.setdefault(slot, deque())
        known.append(now)
        while known[0] <= now - self.window:
            known.popleft()
        if len(known) > self.most:
            return None
        return wait_after(len(known))

    def rested_at(self, slot: Key) -> float | None:
        """Return when ``slot``, which may not start now, may: once its oldest crash no longer counts; None: never."""
        return self._crashes[slot][0] + self.window if self.most else None


def wait_after(crashes: int) -> float:
    """Return the seconds to wait before another start, after so many crashes; each crash doubles them."""
    return float(min(_FIRST_WAIT * 2 ** min(crashes - 1, 30), _LONGEST_WAIT))
