"""Decide in which condition a rank's process is, from what the agent sees of it and hears from it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from asyncpar.core.observe.reporting import Phase

LOOK_SECONDS: Final = 0.5
"""How often an agent looks at its ranks."""

HUNG_SECONDS: Final = 5.0
"""A rank that gives no beat for so long is reported as hung; it gives one every second."""


class Condition(StrEnum):
    """Does a rank's process run?"""

    WELL = "well"
    STOPPED = "stopped"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What an agent knows of one of its ranks; it has been in ``condition`` for ``seconds``.

    ``phase`` None: it has not told of one, as programs that do not use asyncpar never do.
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
        """A sign of life came."""
        self._quiet = 0.0

    def enter(self, phase: Phase) -> None:
        """The rank told of its phase."""
        self.phase = phase
        self._quiet = 0.0

    def look(self, *, is_stopped: bool, now: float) -> bool:
        """Take in whether the process is stopped; True if its condition has changed."""
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
