"""What operations cost in time.  Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from asyncpar.errors import UsageError
from asyncpar.pipeline.operation import OperationKind, PipelineOp


def is_time(value: float) -> bool:
    """Whether ``value`` is a span of time: finite and not negative."""
    return 0.0 <= value < math.inf


CostModel = Callable[[PipelineOp], float]
"""Seconds (or any unit) that an operation takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time of each kind of operation; a whole ``backward`` takes what both halves do, unless said otherwise.

    ``stage_factors``, if given, says for each virtual stage how much longer it takes.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    backward: float | None = None
    stage_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "backward"):
            value = getattr(self, name)
            if value is not None and not is_time(value):
                raise UsageError(f"{name}: expected a finite time of 0 or more, got {value!r}")
        for factor in self.stage_factors:
            if not is_time(factor):
                raise UsageError(f"stage_factors: expected a finite factor of 0 or more, got {factor!r}")

    def __call__(self, operation: PipelineOp) -> float:
        factor = self.stage_factors[operation.stage] if self.stage_factors else 1.0
        match operation.kind:
            case OperationKind.FORWARD:
                return factor * self.forward
            case OperationKind.BACKWARD_INPUT:
                return factor * self.backward_input
            case OperationKind.BACKWARD_WEIGHT:
                return factor * self.backward_weight
            case OperationKind.BACKWARD:
                halves = self.backward_input + self.backward_weight
                return factor * (halves if self.backward is None else self.backward)
        raise AssertionError(f"{operation} is not computed")


UNIT_COSTS = Costs()
"""One for a forward and for each half of a backward pass."""


def cost_of(operation: PipelineOp, costs: CostModel) -> float:
    """Return what an operation costs; raise a UsageError if that is no span of time."""
    cost = costs(operation)
    if not is_time(cost):
        raise UsageError(f"costs: expected a finite time of 0 or more for {operation}, got {cost!r}")
    return cost
