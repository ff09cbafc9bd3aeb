"""Learning rate schedules: functions of the step number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine:
    """Rise linearly to ``peak`` over ``warmup`` steps, then fall along half a cosine to ``floor * peak``.

    The cosine is that of Loshchilov and Hutter (2017), without restarts; after ``steps`` the rate stays at the floor.
    """

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise UsageError(f"peak: expected a positive learning rate, got {self.peak}")
        if not 0 <= self.warmup <= self.steps or self.steps < 1:
            raise UsageError(f"warmup: expected 0 <= warmup <= steps and steps >= 1, got {self.warmup}, {self.steps}")
        if not 0.0 <= self.floor <= 1.0:
            raise UsageError(f"floor: expected a fraction of the peak in 0..1, got {self.floor}")

    def __call__(self, step: int) -> float:
        """Return the learning rate of ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.peak * (self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
