"""Votes of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.owed import OwedCollective
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled


class Ballot:
    """One vote on ``count`` questions, answered yes if any rank says yes.

    Whether it is cast or given up, it has begun its collective exactly once, so the uses of ``key`` agree between
    ranks even after a step that failed on some.  Behind the answers there is a place for each rank that gives up: so
    its vote, should it count because all others have voted already, is not taken for a real one.
    """

    def __init__(self, communicator: Communicator, *, count: int, key: str) -> None:
        self._communicator = communicator
        self._count = count
        self._key = key
        self._votes = np.zeros(count + communicator.size, np.uint8)
        self._votes[count + communicator.rank] = 1
        self._exchange: OwedCollective[Any] = OwedCollective(
            lambda: communicator.all_reduce(self._votes, "max", key=key)
        )

    async def cast(self, answers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the answers of all ranks together.  Raises ``PeerCancelled`` when one has given up."""
        assert answers.shape == (self._count,), "one answer for each question"
        self._votes[: self._count] = answers
        self._votes[self._count :] = 0
        await self._exchange.run()
        quitters = np.flatnonzero(self._votes[self._count :])
        if quitters.size:
            culprit = self._communicator.ranks[int(quitters[0])]
            raise PeerCancelled(
                f"rank {self._communicator.ranks[self._communicator.rank]}: rank {culprit} has failed or given up "
                f"before it voted ({self._key})",
                rank=culprit,
                operation="vote",
                cause="it has given up",
            )
        return self._votes[: self._count].astype(np.bool_)

    async def give_up(self) -> None:
        """Tell the other ranks that this one does not vote, unless it has.  Waits for nobody."""
        await self._exchange.begin_and_cancel()
