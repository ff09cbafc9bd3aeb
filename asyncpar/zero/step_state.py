"""The phases of an engine's step, and the calls that each allows.  Pure."""

from __future__ import annotations

from enum import StrEnum

from asyncpar.errors import UsageError


class EnginePhase(StrEnum):
    """Phases of a step.

    NEW: not prepared.  OPEN: gradients may come.  REDUCED: owners have them.  STEPPED: they are used up.  BROKEN: a
    step has failed.
    """

    NEW = "new"
    OPEN = "open"
    REDUCED = "reduced"
    STEPPED = "stepped"
    BROKEN = "broken"


_ADVICE = {
    EnginePhase.NEW: "await prepare() on all ranks first",
    EnginePhase.OPEN: "the gradients of this step are not reduced; await reduce() first",
    EnginePhase.REDUCED: "the gradients of this step are reduced, and must not be averaged twice; zero_grad() first",
    EnginePhase.STEPPED: "the gradients of the last step are used up; zero_grad() first",
}


class StepState:
    """``accumulates``: gradients may be reduced several times in a step."""

    def __init__(self, *, accumulates: bool) -> None:
        self.phase = EnginePhase.NEW
        self._why = ""
        self._giving = (EnginePhase.OPEN, EnginePhase.REDUCED) if accumulates else (EnginePhase.OPEN,)

    def check_new(self, what: str) -> None:
        """Raise ``UsageError`` unless the engine is not prepared yet."""
        if self.phase is not EnginePhase.NEW:
            raise UsageError(f"{what}: this must come before prepare()")

    def check_prepared(self, what: str) -> None:
        """Raise ``UsageError`` unless the engine was prepared."""
        if self.phase is EnginePhase.NEW:
            raise UsageError(f"{what}: {_ADVICE[EnginePhase.NEW]}")

    def check_giving(self, what: str) -> None:
        """Raise ``UsageError`` unless gradients may come."""
        self._check(what, *self._giving)

    def check_reduced(self, what: str) -> None:
        """Raise ``UsageError`` unless gradients are reduced and wait for the step."""
        self._check(what, EnginePhase.REDUCED)

    def check_sound(self, what: str) -> None:
        """Raise ``UsageError`` unless the engine is prepared and not broken."""
        self._check(what, EnginePhase.OPEN, EnginePhase.REDUCED, EnginePhase.STEPPED)

    def break_off(self, why: str) -> None:
        """Record a failure; the first reason is kept."""
        if self.phase is not EnginePhase.BROKEN:
            self.phase, self._why = EnginePhase.BROKEN, why

    def _check(self, what: str, *allowed: EnginePhase) -> None:
        if self.phase in allowed:
            return
        if self.phase is EnginePhase.BROKEN:
            raise UsageError(f"{what}: an earlier step failed ({self._why}); await resume() on all ranks first")
        raise UsageError(f"{what}: {_ADVICE[self.phase]}")
