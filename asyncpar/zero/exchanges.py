"""What replicas tell each other before a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from asyncpar.errors import AsyncparError, NonFiniteValue, UsageError
from asyncpar.nn.optimizers import combined
from asyncpar.zero.owed import Owed
from asyncpar.zero.reduction import Means


class NormExchange:
    """Every replica's part of the squared norm, ``own`` on this one."""

    def __init__(self, means: Means, own: float) -> None:
        row, key = np.array([own]), f"{means.key()}/norm"
        self._exchange: Owed[Any] = Owed(lambda: means.communicator.all_gather(row, key=key))

    async def run(self) -> float:
        """Return the norm: the same bits on every replica."""
        rows = await self._exchange.run()
        return math.sqrt(combined(rows[:, 0].tolist()))

    def give_up(self) -> None:
        """Tell the others that this rank has no part.  Waits for nobody."""
        self._exchange.give_up()


class StepAgreement:
    """An exchange in which replicas say what step they are about to take."""

    def __init__(self, means: Means, *, step: int, learning_rate: float, factor: float, is_finite: bool) -> None:
        self._communicator = means.communicator
        self._own = np.array([step, learning_rate, factor, is_finite], np.float64)
        key = f"{means.key()}/step"
        self._exchange: Owed[Any] = Owed(lambda: self._communicator.all_gather(self._own, key=key))

    async def run(self) -> AsyncparError | None:
        """Return what is wrong, on every replica alike: that they are not at the same step, or gradients not finite."""
        rows = await self._exchange.run()
        ranks = self._communicator.ranks
        for place, what in enumerate(("number of steps taken", "learning rate", "scale")):
            values = rows[:, place].tolist()
            for rank, value in zip(ranks, values, strict=True):
                if not math.isfinite(value) or (value < 0.0 and what == "learning rate"):
                    return UsageError(f"step: expected a finite {what} >= 0, but rank {rank} has {value}")
                if value != values[0]:
                    first = f"rank {ranks[0]} has {values[0]}"
                    return UsageError(f"step: expected one {what} on all replicas, but {first}, rank {rank} {value}")
        culprits = [ranks[rank] for rank in np.flatnonzero(rows[:, 3] == 0)]
        if culprits:
            return NonFiniteValue(
                f"gradients: expected finite numbers at step {int(self._own[0])}, got others in what "
                f"rank{'s' * (len(culprits) > 1)} {', '.join(map(str, culprits))} reduced"
            )
        return None

    def give_up(self) -> None:
        """Tell the others that this rank takes no step.  Waits for nobody."""
        self._exchange.give_up()
