"""Votes of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.owed import OwedCollective
from asyncpar.collectives.communicator import Communicator


class Ballot:
    """One vote on ``count`` questions; the answer to each is yes if any rank says yes.

    Each rank calls ``cast`` or ``close``; the uses of ``key`` stay equal on all ranks either way.
    """

    def __init__(self, communicator: Communicator, *, count: int, key: str) -> None:
        self._votes = np.zeros(count, np.uint8)
        self._exchange: OwedCollective[Any] = OwedCollective(
            lambda: communicator.all_reduce(self._votes, "max", key=key)
        )

    async def cast(self, answers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the answers of all ranks together.  Raises ``PeerCancelled`` when a rank closes its ballot."""
        assert answers.shape == self._votes.shape, "one answer for each question"
        self._votes[:] = answers
        await self._exchange.run()
        return self._votes.astype(np.bool_)

    def close(self) -> None:
        """Abort the vote on all ranks, unless this rank has voted.  Does not wait."""
        self._exchange.close()
