"""Uneven inputs: ranks that have no more inputs take part in the collectives of the others until all have none."""

from __future__ import annotations

import numpy as np

from asyncpar.agreement.exchanges import Ballot
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError


class Joining:
    """The roll-call of one ``join`` block.

    Before each round all ranks say whether they have inputs of their own (are *active*); those that have not go along
    as shadows, until no rank is active.  ``wants_parameters`` says that this rank, as a shadow, does not update its
    parameters, and so needs those of a rank that was active to the end.
    """

    def __init__(self, communicator: Communicator, *, key: str, by_initial_size: bool, wants_parameters: bool) -> None:
        self._communicator = communicator
        self._key = key
        self._by_initial_size = by_initial_size
        self._wants_parameters = wants_parameters
        self._active: tuple[int, ...] = ()
        self.is_broken = False
        """Has a round failed, so that all ranks know that this one will not go on?"""
        self.root: int | None = None
        """A rank that was active in the last round; None when there was none, or no rank needs to know."""

    async def call_roll(self, *, is_active: bool) -> bool:
        """Say whether this rank is active, and return whether any is.  Every rank has to call it."""
        size = self._communicator.size
        answers = np.zeros(size + 1, np.bool_)
        answers[self._communicator.rank] = is_active
        answers[size] = self._wants_parameters
        try:
            answers = await self._ballot().cast(answers)
        except (AsyncparError, TimeoutError):
            self.is_broken = True
            raise
        self._active = tuple(np.flatnonzero(answers[:size]).tolist())
        if self._active:
            self.root = self._active[0] if answers[size] else None
        return bool(self._active)

    def factor(self) -> float:
        """Return what to multiply the mean over all ranks with to get that over the ranks of the divisor."""
        return 1.0 if self._by_initial_size else self._communicator.size / len(self._active)

    def close(self) -> None:
        """Abort the next roll-call on all ranks, unless a failed round has told them already.  Does not wait."""
        if not self.is_broken:
            self._ballot().close()

    def _ballot(self) -> Ballot:
        return Ballot(self._communicator, count=self._communicator.size + 1, key=self._key)
