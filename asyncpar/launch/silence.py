"""Decide when ranks that do not run are given up.  Pure."""

from __future__ import annotations

from typing import Final

from asyncpar.core.observe.reporting import Phase
from asyncpar.launch.vitals import Condition, RankState

FORMING_SECONDS: Final = 3.0
"""How long a rank may be stopped on its way into the world while others wait for it there."""

_WORDS: Final = {
    Condition.STOPPED: "was stopped",
    Condition.HUNG: "ran no Python code (something held its interpreter lock)",
}


class SilentRanks:
    """Follows the ranks of one generation; ``limit`` is for how many seconds one may be silent, None for ever."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._states: dict[int, RankState] = {}
        self._silent_since: dict[int, float] = {}

    def take(self, state: RankState, *, now: float) -> None:
        """An agent tells of a rank."""
        self._states[state.rank] = state
        if state.condition is Condition.WELL:
            self._silent_since.pop(state.rank, None)
        else:
            self._silent_since[state.rank] = now - max(0.0, state.seconds)

    def forget(self, rank: int) -> None:
        """The process of ``rank`` is gone, or is to be killed."""
        self._silent_since.pop(rank, None)
        self._states.pop(rank, None)

    def clear(self) -> None:
        """A new generation begins."""
        self._states.clear()
        self._silent_since.clear()

    @property
    def next_deadline(self) -> float | None:
        """When the next rank is to be given up, None if none is silent."""
        return min((at for rank in self._silent_since if (at := self._deadline(rank)) is not None), default=None)

    def expired(self, now: float) -> list[tuple[int, str]]:
        """Return the ranks that are to be given up now, and why."""
        late = [rank for rank in self._silent_since if (at := self._deadline(rank)) is not None and at <= now]
        return [(rank, self._describe(rank, now)) for rank in sorted(late)]

    def _deadline(self, rank: int) -> float | None:
        if self._limit is None:
            return None
        state, limit = self._states[rank], self._limit
        if state.condition is Condition.STOPPED and state.phase in (None, Phase.FORMING) and self._is_forming():
            limit = min(limit, FORMING_SECONDS)
        return self._silent_since[rank] + limit

    def _is_forming(self) -> bool:
        return any(state.phase is Phase.FORMING for state in self._states.values())

    def _describe(self, rank: int, now: float) -> str:
        state = self._states[rank]
        where = " while the world was forming" if state.phase in (None, Phase.FORMING) else ""
        return f"{_WORDS[state.condition]} for {now - self._silent_since[rank]:.1f} s{where}"
