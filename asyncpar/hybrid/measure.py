"""What one rank measures of one training step.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncpar.errors import UsageError

_SECONDS = (
    "seconds",
    "compute_seconds",
    "communication_seconds",
    "pipeline_wait_seconds",
    "tensor_parallel_seconds",
)
_COUNTS = ("step", "memory_used", "memory_limit", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One step on one rank.

    ``seconds`` is what the whole step took.  Parts of it: ``compute_seconds`` in forward, backward and optimizer
    without what they communicate; ``tensor_parallel_seconds`` in collectives of tensor-parallel ranks;
    ``pipeline_wait_seconds`` waiting for activations and gradients of neighbouring stages; ``communication_seconds``
    waiting for other collectives, such as those of gradients and parameters, as far as compute does not hide them.

    ``memory_used`` is the peak in bytes, of ``memory_limit`` bytes (0: there is no limit).  ``tokens`` are those of the
    whole batch, of all replicas together; 0 on ranks that do not know.
    """

    step: int
    seconds: float
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    pipeline_wait_seconds: float = 0.0
    tensor_parallel_seconds: float = 0.0
    memory_used: int = 0
    memory_limit: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise UsageError(f"{name}: expected a finite number of seconds, 0 or more, got {value}")
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise UsageError(f"{name}: expected 0 or more, got {getattr(self, name)}")
