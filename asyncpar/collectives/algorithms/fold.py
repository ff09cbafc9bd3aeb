"""Fold any number of ranks into the largest power of two below it.

Of the first ``2 * surplus`` ranks the even ones are absorbed by their right neighbours.  The others take *places*
0 to ``power - 1`` in rank order.  Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations


class Fold:
    """Who takes part in the power-of-two part of an algorithm, and for whom."""

    def __init__(self, rank: int, size: int) -> None:
        self.power = 1 << (size.bit_length() - 1)
        self.surplus = size - self.power
        self._rank = rank

    @property
    def absorbed_by(self) -> int | None:
        """The rank that takes part in place of this one, None if this one does."""
        return self._rank + 1 if self._rank < 2 * self.surplus and self._rank % 2 == 0 else None

    @property
    def absorbs(self) -> int | None:
        """The rank that this one takes part for besides itself, if any."""
        return self._rank - 1 if self._rank < 2 * self.surplus and self._rank % 2 == 1 else None

    @property
    def place(self) -> int:
        """The place of this rank, or of the one that absorbs it."""
        return self._rank // 2 if self._rank < 2 * self.surplus else self._rank - self.surplus

    def rank_at(self, place: int) -> int:
        """Return the rank that takes part at ``place``."""
        return 2 * place + 1 if place < self.surplus else place + self.surplus

    def partner(self, distance: int) -> int:
        """Return the rank at this place with one bit flipped."""
        return self.rank_at(self.place ^ distance)

    def distances(self) -> list[int]:
        """Return 1, 2, 4, ... below ``power``."""
        return [1 << bit for bit in range(self.power.bit_length() - 1)]

    def first_rank(self, place: int) -> int:
        """Return the first rank of ``place`` (absorbed ones count); of ``power`` it is the number of ranks."""
        return 2 * place if place < self.surplus else place + self.surplus
