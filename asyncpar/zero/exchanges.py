"""Exchanges between replicas before a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.errors import AsyncparError, NonFiniteValue, UsageError
from asyncpar.nn.optimizers import all_finite, combined
from asyncpar.zero.reduction import Means


class NormExchange:
    """Every replica's part of the squared norm, ``own`` on this one."""

    def __init__(self, means: Means, own: float) -> None:
        row, key = np.array([own]), f"{means.key()}/norm"
        self._exchange: OwedCollective[Any] = OwedCollective(lambda: means.communicator.all_gather(row, key=key))

    async def run(self) -> float:
        """Return the norm: the same bits on every replica."""
        rows = await self._exchange.run()
        return math.sqrt(combined(rows[:, 0].tolist()))

    def give_up(self) -> None:
        """Abort the exchange on all ranks, unless it has begun.  Does not wait."""
        self._exchange.close()


class StepAgreement:
    """An exchange in which replicas say what step they are about to take."""

    def __init__(self, means: Means, *, step: int, learning_rate: float, factor: float, is_finite: bool) -> None:
        self._communicator = means.communicator
        self._own = np.array([step, learning_rate, factor, is_finite], np.float64)
        key = f"{means.key()}/step"
        self._exchange: OwedCollective[Any] = OwedCollective(lambda: self._communicator.all_gather(self._own, key=key))
        self._search = CulpritSearch(means)

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
        if rows[:, 3].all():
            return None
        found = await self._search.run()
        return NonFiniteValue(f"gradients: expected finite numbers at step {int(self._own[0])}, but {found}")

    def give_up(self) -> None:
        """Abort the exchange on all ranks, unless it has begun.  Does not wait."""
        self._exchange.close()
        self._search.give_up()


class CulpritSearch:
    """An exchange in which replicas say which gradients were not finite on them, once it is known that some are not."""

    def __init__(self, means: Means) -> None:
        self._means = means
        communicator, key = means.communicator, f"{means.key()}/culprits"
        self._exchange: OwedCollective[Any] = OwedCollective(lambda: communicator.all_gather(self._own(), key=key))

    async def run(self) -> str:
        """Return, on every replica alike, which ranks brought what; or, where none did, which sums overflowed."""
        found = await self._exchange.run()
        names = np.array([share.parameter.name for share in self._means.shares], object)
        ranks = self._means.communicator.ranks
        brought = [
            f"rank {rank} has NaN or infinity in {', '.join(names[row])}"
            for rank, row in zip(ranks, found[:, 0], strict=True)
            if row.any()
        ]
        return "; ".join(brought) or f"the sum over ranks overflowed in {', '.join(names[found[:, 1].any(axis=0)])}"

    def give_up(self) -> None:
        """Abort the exchange on all ranks, unless it has begun.  Does not wait."""
        self._exchange.close()

    def _own(self) -> NDArray[np.bool_]:
        """Return, for each parameter, whether this rank's gradient was not finite, and whether what it reduced is."""
        shares = self._means.shares
        return np.array([spoiled(self._means), [not all_finite(share.own_gradient) for share in shares]], np.bool_)


def spoiled(means: Means) -> list[bool]:
    """Return, for each parameter, whether its gradient was not finite on this rank before it was reduced."""
    if means.partition.size == 1:  # a gradient is its own sum
        return [not all_finite(share.own_gradient) for share in means.shares]
    return [share.is_spoiled for share in means.shares]
