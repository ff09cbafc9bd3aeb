"""Decide the condition of ranks from what agents observe, and when ranks that do not run are given up.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from asyncpar.core.observe.reporting import Phase

LOOK_SECONDS: Final = 0.2
"""Seconds between two looks of an agent at its ranks."""

HUNG_SECONDS: Final = 5.0
"""Seconds without a heartbeat after which a rank is reported as hung; it sends one every second."""


class Condition(StrEnum):
    """The condition of a rank's process."""

    WELL = "well"
    STOPPED = "stopped"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of a rank as its agent sees it; it has been in ``condition`` for ``seconds``.

    ``phase`` None: none was reported; programs that do not use asyncpar report none.
    """

    generation: int
    rank: int
    phase: Phase | None = None
    condition: Condition = Condition.WELL
    seconds: float = 0.0


class Vitals:
    """Follows one rank.  Time in which the agent itself did not run, or was late, counts for nothing."""

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self.condition = Condition.WELL
        self.seconds = 0.0
        self._stopped = self._quiet = 0.0
        self._looked: float | None = None

    def beat(self) -> None:
        """Take a heartbeat."""
        self._quiet = 0.0

    def enter(self, phase: Phase) -> None:
        """Take the phase that the rank reports."""
        self.phase = phase
        self._quiet = 0.0

    def look(self, *, is_stopped: bool, now: float) -> bool:
        """Update the condition; return whether it has changed."""
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        self._stopped = self._stopped + passed if is_stopped else 0.0
        beats = self.phase in (Phase.FORMING, Phase.MEMBER)
        self._quiet = self._quiet + passed if beats and not is_stopped else 0.0
        before = self.condition
        self.condition, self.seconds = Condition.WELL, 0.0
        if is_stopped:
            self.condition, self.seconds = Condition.STOPPED, self._stopped
        elif self._quiet >= HUNG_SECONDS:
            self.condition, self.seconds = Condition.HUNG, self._quiet
        return self.condition is not before


FORMING_SECONDS: Final = 3.0
"""Seconds that a rank may be stopped while it joins the world and others wait for it."""

_WORDS: Final = {
    Condition.STOPPED: "was stopped",
    Condition.HUNG: "ran no Python code (something held its interpreter lock)",
}


CONDITION_WORDS: Final = {
    Condition.WELL: "",
    Condition.STOPPED: "is stopped (SIGSTOP, or a debugger)",
    Condition.HUNG: "runs no Python code (something holds its interpreter lock)",
}
"""What is said of a rank that others wait for."""


def limit_of(condition: Condition, silent_after: float | None, stopped_after: float | None) -> float | None:
    """Return how many seconds a rank may be in ``condition``, None: for ever."""
    if condition is not Condition.STOPPED or stopped_after is None:
        return silent_after
    return stopped_after if silent_after is None else min(stopped_after, silent_after)


class SilentRanks:
    """Follows the ranks of one generation; a rank may be silent for ``limit`` seconds, None for ever.

    One that is stopped may be so for ``stopped_limit`` seconds, if that is less; None: as any that is silent.
    """

    def __init__(self, limit: float | None, stopped_limit: float | None = None) -> None:
        self._limit = limit
        self._stopped_limit = stopped_limit
        self._states: dict[int, RankState] = {}
        self._silent_since: dict[int, float] = {}

    def take(self, state: RankState, *, now: float) -> None:
        """Take the state of a rank."""
        self._states[state.rank] = state
        if state.condition is Condition.WELL:
            self._silent_since.pop(state.rank, None)
        else:
            self._silent_since[state.rank] = now - max(0.0, state.seconds)

    def forget(self, rank: int) -> None:
        """Forget a rank whose process has ended or is to be killed."""
        self._silent_since.pop(rank, None)
        self._states.pop(rank, None)

    def clear(self) -> None:
        """Forget all ranks, before a new generation."""
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
        state = self._states[rank]
        limit = limit_of(state.condition, self._limit, self._stopped_limit)
        if limit is None:
            return None
        if state.condition is Condition.STOPPED and state.phase in (None, Phase.FORMING) and self._is_forming():
            limit = min(limit, FORMING_SECONDS)
        return self._silent_since[rank] + limit

    def _is_forming(self) -> bool:
        return any(state.phase is Phase.FORMING for state in self._states.values())

    def _describe(self, rank: int, now: float) -> str:
        state = self._states[rank]
        where = " while the world was forming" if state.phase in (None, Phase.FORMING) else ""
        return f"{_WORDS[state.condition]} for {now - self._silent_since[rank]:.1f} s{where}"
