"""The state of ranks at the beginning of a common call, and the completion of a step that failed on some of them.
Pure.

Theory of operation.  A rank that fails or is cancelled notifies the others, but they may receive that at different
moments: one may have taken the step when another has not.  Therefore every common call begins with a meeting, in which
all ranks report their states, and all arrive at the same conclusions:

- After a failure they use new names for everything matched by name or by order, with the number of the ``attempt``:
  some may have used up names that others have not.
- A rank takes a step only when all have reduced their gradients and know that of each other.  So a rank that has not
  taken a step that another has taken can still take it alone, with the norm and the rate that the other reports.
- The caller of that step got an error; so the next one is refused with ``StepTaken``, on all ranks, so
  that no batch is trained on twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import AsyncparError, UsageError
from asyncpar.zero.errors import StepTorn


class StepTaken(AsyncparError):  # noqa: N818
    """The last step failed on some ranks only after it was done; now all have taken it, and nothing else was done.

    ``steps`` of the coordinator is the number of the next one.
    """


class Intent(StrEnum):
    """The call that ranks begin together."""

    TRAIN_STEP = "train_step"
    BACKWARD_PASS = "backward_pass"
    OPTIMIZER_STEP = "optimizer_step"
    FORWARD_PASS = "forward_pass"
    EVALUATE = "evaluate"
    SAVE = "save"
    LOAD = "load"

    @property
    def trains(self) -> bool:
        return self in (Intent.TRAIN_STEP, Intent.BACKWARD_PASS, Intent.OPTIMIZER_STEP)


_INTENTS = tuple(Intent)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The state of one rank.

    ``rate`` is the learning rate of the step it is about to take.  ``steps`` counts those it has taken, the last with
    ``last_norm`` and ``last_rate``.  ``has_failed``: its last call failed there; ``was_taken``: a step was taken
    nevertheless; ``is_ready``: the gradients of the next one are reduced there; ``is_torn``: it failed while a
    checkpoint was being restored.
    """

    intent: Intent
    rate: float
    attempt: int
    steps: int
    last_norm: float
    last_rate: float
    has_failed: bool
    was_taken: bool
    is_ready: bool
    is_torn: bool

    def row(self) -> NDArray[np.float64]:
        """Return the status as numbers."""
        _, *rest = astuple(self)
        return np.array([_INTENTS.index(self.intent), *rest], np.float64)

    @classmethod
    def of_row(cls, row: NDArray[np.float64]) -> RankStatus:
        """Return the status from its ``row``."""
        kinds: dict[str, Any] = {"attempt": int, "steps": int, "rate": float, "last_norm": float, "last_rate": float}
        names = [field.name for field in fields(cls)]
        values = {name: kinds.get(name, bool)(value) for name, value in zip(names[1:], row[1:], strict=True)}
        return cls(intent=_INTENTS[int(row[0])], **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The conclusion of all ranks: the number of the ``attempt``, whether they ``must_resume``, the rank
    ``ahead`` whose last step the others take, and the ``error`` that all raise after that.
    """

    attempt: int
    must_resume: bool
    ahead: RankStatus
    was_taken: bool
    error: AsyncparError | None


def plan_recovery(statuses: Sequence[RankStatus]) -> RecoveryPlan:
    """Return the plan that follows from the states of all ranks, in their order."""
    ahead = max(statuses, key=lambda one: one.steps)
    behind = [one for one in statuses if one.steps < ahead.steps]
    must_resume = any(one.has_failed for one in statuses)
    was_taken = bool(behind) or any(one.was_taken for one in statuses)
    error: AsyncparError | None = _misuse(statuses)
    if error is None and statuses[0].intent is not Intent.LOAD:
        error = _torn(statuses, ahead)
        if error is None and was_taken and statuses[0].intent.trains:
            error = StepTaken(
                f"step {ahead.steps - 1} failed on some ranks when others had taken it; all have taken it now, and "
                f"nothing else was done: go on with step {ahead.steps}"
            )
            was_taken = False
    return RecoveryPlan(
        attempt=max(one.attempt for one in statuses) + must_resume,
        must_resume=must_resume,
        ahead=ahead,
        was_taken=was_taken,
        error=error,
    )


def _misuse(statuses: Sequence[RankStatus]) -> UsageError | None:
    """Return the error for ranks that are about to do different things, or something impossible."""
    first = statuses[0]
    for rank, one in enumerate(statuses):
        if one.intent is not first.intent:
            return UsageError(f"{first.intent}: expected it to be called on all ranks, got {one.intent} on rank {rank}")
        if not (one.rate >= 0.0 and math.isfinite(one.rate)):
            return UsageError(f"learning_rate: expected a finite number of 0 or more, got {one.rate} on rank {rank}")
        if one.rate != first.rate:
            return UsageError(
                f"learning_rate: expected the same on all ranks, got {first.rate} on rank 0, {one.rate} on rank {rank}"
            )
    return None


def _torn(statuses: Sequence[RankStatus], ahead: RankStatus) -> StepTorn | None:
    """Return the error for ranks that hold parts of different steps that cannot be completed."""
    for rank, one in enumerate(statuses):
        if one.is_torn:
            return StepTorn(f"rank {rank} failed while a checkpoint was being restored; load it again", rank=rank)
        if one.steps < ahead.steps - 1 or (one.steps < ahead.steps and not one.is_ready):
            return StepTorn(
                f"rank {rank} has taken {one.steps} steps and others {ahead.steps}; load a checkpoint", rank=rank
            )
    return None
