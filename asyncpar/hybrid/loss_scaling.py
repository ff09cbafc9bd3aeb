"""Loss scaling: small gradients survive half precision (Micikevicius et al. 2018, Mixed Precision Training).  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """Settings of the scale of the loss, which starts at ``initial``.

    A step whose gradients overflow is skipped, and the scale multiplied by ``backoff``, but not below ``least``; after
    ``interval`` steps without overflow it is multiplied by ``growth``.  With ``growth`` and ``backoff`` 1 it is fixed.
    Powers of two scale without rounding.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (("initial", 0.0, math.inf), ("growth", 1.0, math.inf), ("backoff", 0.0, 1.0)):
            value = getattr(self, name)
            if not (low < value <= high or value == 1.0) or not math.isfinite(value):
                raise UsageError(f"{name}: expected a number above {low:g} and up to {high:g}, got {value}")
        if not 0.0 < self.least <= self.initial:
            raise UsageError(f"least: expected a number above 0 and up to initial = {self.initial}, got {self.least}")
        if self.interval < 1:
            raise UsageError(f"interval: expected at least 1 step, got {self.interval}")


NO_SCALING = LossScaling(initial=1.0, growth=1.0, backoff=1.0)


class LossScaler:
    """Keeps the scale.  It is the same on all ranks if each calls ``update`` with their common finding."""

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self.scale = scaling.initial
        self.skipped_steps = 0
        self._steps_without_overflow = 0

    def update(self, *, has_overflowed: bool) -> None:
        """Record the outcome of a step."""
        scaling = self._scaling
        if has_overflowed:
            self.scale = max(scaling.least, self.scale * scaling.backoff)
            self.skipped_steps += 1
            self._steps_without_overflow = 0
            return
        self._steps_without_overflow += 1
        if self._steps_without_overflow == scaling.interval:
            grown = self.scale * scaling.growth
            self.scale = grown if math.isfinite(grown) else self.scale
            self._steps_without_overflow = 0

    def state(self) -> dict[str, float | int]:
        """Return the state for ``restore``."""
        return {
            "scale": self.scale,
            "skipped_steps": self.skipped_steps,
            "steps_without_overflow": self._steps_without_overflow,
        }

    def restore(self, state: Mapping[str, float | int]) -> None:
        """Restore the result of ``state``.  Raises ``UsageError`` for anything else."""
        wanted = {"scale", "skipped_steps", "steps_without_overflow"}
        if set(state) != wanted or not state["scale"] > 0.0:
            raise UsageError(f"state: expected {sorted(wanted)} with a positive scale, got {dict(state)}")
        self.scale = float(state["scale"])
        self.skipped_steps = int(state["skipped_steps"])
        self._steps_without_overflow = int(state["steps_without_overflow"])
