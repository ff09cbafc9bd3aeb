"""Where a trainer is in a step, and what may come next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from asyncpar.errors import UsageError
from asyncpar.multinode.flow import StepFlow
from asyncpar.multinode.intake import GradientIntake
from asyncpar.nn import Parameter


class Phase(Enum):
    """What may be called next in a step."""

    GATHERING = "update_gradients or synchronize_gradients"
    SYNCHRONIZING = "nothing, until the synchronization under way has ended"
    SYNCHRONIZED = "apply_gradients"
    APPLIED = "optimizer_step"


@dataclass(slots=True, kw_only=True)
class Registered:
    """What there is once parameters are known.  ``reduction`` says how gradients are reduced, and by whom."""

    parameters: tuple[Parameter, ...]
    intake: GradientIntake
    flow: StepFlow
    reduction: str
    phase: Phase = Phase.GATHERING

    def check(self, phase: Phase, what: str) -> None:
        """Raise ``UsageError`` unless it is time for ``what``."""
        if self.phase is not phase:
            raise UsageError(f"{what}: expected {self.phase.value} next")

    def check_between_steps(self, what: str) -> None:
        """Raise ``UsageError`` in the middle of a step."""
        self.check(Phase.GATHERING, what)
        if self.intake.micro_steps:
            raise UsageError(f"{what}: expected no gradients, got those of {self.intake.micro_steps} micro-steps")

    def drop(self) -> None:
        """Forget all gradients."""
        self.intake.drop()
        self.flow.forget()
