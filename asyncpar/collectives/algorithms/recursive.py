"""Recursive halving and doubling: ``log2(size)`` steps with partners at distance 1, 2, 4, ...

Any number of ranks is folded into the largest power of two up to it.  Of the first ``2 * surplus`` ranks the even ones
are absorbed by their right neighbours; the others take *places* 0 to ``power - 1`` in rank order.

Sources: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncpar.collectives.algorithms.steps import Recv, Round, Send, Span, Spans, one, span


class Fold:
    """Mapping of ranks to the participants of the power-of-two part of an algorithm."""

    def __init__(self, rank: int, size: int) -> None:
        self.power = 1 << (size.bit_length() - 1)
        self.surplus = size - self.power
        self._rank = rank

    @property
    def absorbed_by(self) -> int | None:
        """The rank that takes part in place of this one, None if this one does itself."""
        return self._rank + 1 if self._rank < 2 * self.surplus and self._rank % 2 == 0 else None

    @property
    def absorbs(self) -> int | None:
        """The rank that this one takes part for besides itself, None if there is none."""
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


def doubling_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Exchange the whole buffer with a partner at distance 1, 2, 4, ... and sum; one chunk.

    ``log2(size)`` steps, each sending the whole buffer.  Sizes that are not powers of two first fold the surplus ranks
    into neighbours and send them the result at the end: two more steps.  Both partners combine the same two operands in
    rank order, so all ranks end with the same bits.
    """
    fold = Fold(rank, size)
    whole = one(0)
    if fold.absorbed_by is not None:
        yield (Send(fold.absorbed_by, whole),)
        yield (Recv(fold.absorbed_by, whole),)
        return
    if fold.absorbs is not None:
        yield (Recv(fold.absorbs, whole, reduce=True),)
    for distance in fold.distances():
        peer = fold.partner(distance)
        yield Send(peer, whole), Recv(peer, whole, reduce=True)
    if fold.absorbs is not None:
        yield (Send(fold.absorbs, whole),)


def halving_chunks(size: int) -> int:
    """Return the number of chunks that ``halving_all_reduce`` works on: the largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


def halving_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Halve the buffer with partners at distance size/2, ..., 1 and sum; then double it back.

    ``2 log2(size)`` steps; each rank sends ``2 (size - 1) / size`` of the buffer, the least possible.  For sizes that
    are not powers of two the surplus ranks are folded into neighbours: two more steps, and one more whole buffer for
    them.
    """
    fold = Fold(rank, size)
    whole = (Span(0, fold.power),)
    if fold.absorbed_by is not None:
        yield (Send(fold.absorbed_by, whole),)
        yield (Recv(fold.absorbed_by, whole),)
        return
    if fold.absorbs is not None:
        yield (Recv(fold.absorbs, whole, reduce=True),)
    yield from _halve(fold, lambda place: place)
    yield from _double(fold, lambda place: place)
    if fold.absorbs is not None:
        yield (Send(fold.absorbs, whole),)


def halving_reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Leave the sum of chunk ``rank`` on each rank; ``size`` chunks, ``log2(size)`` steps (two more when folded)."""
    fold = Fold(rank, size)
    if fold.absorbed_by is not None:
        yield (Send(fold.absorbed_by, (Span(0, size),)),)
        yield (Recv(fold.absorbed_by, one(rank)),)
        return
    if fold.absorbs is not None:
        yield (Recv(fold.absorbs, (Span(0, size),), reduce=True),)
    yield from _halve(fold, fold.first_rank)
    if fold.absorbs is not None:
        yield (Send(fold.absorbs, one(fold.absorbs)),)


def halving_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Send chunk ``rank`` of each rank to all; ``size`` chunks, ``log2(size)`` steps (two more when folded)."""
    fold = Fold(rank, size)
    if fold.absorbed_by is not None:
        yield (Send(fold.absorbed_by, one(rank)),)
        yield (Recv(fold.absorbed_by, span(0, rank) + span(rank + 1, size)),)
        return
    if fold.absorbs is not None:
        yield (Recv(fold.absorbs, one(fold.absorbs)),)
    yield from _double(fold, fold.first_rank)
    if fold.absorbs is not None:
        yield (Send(fold.absorbs, span(0, fold.absorbs) + span(fold.absorbs + 1, size)),)


def _block(place: int, distance: int, first: Callable[[int], int]) -> Spans:
    """Return the chunks of the aligned block of ``distance`` places around ``place``."""
    start = place - place % distance
    return (Span(first(start), first(start + distance)),)


def _halve(fold: Fold, first: Callable[[int], int]) -> Iterator[Round]:
    for distance in reversed(fold.distances()):
        peer = fold.partner(distance)
        theirs = _block(fold.place ^ distance, distance, first)
        yield Send(peer, theirs), Recv(peer, _block(fold.place, distance, first), reduce=True)


def _double(fold: Fold, first: Callable[[int], int]) -> Iterator[Round]:
    for distance in fold.distances():
        peer = fold.partner(distance)
        theirs = _block(fold.place ^ distance, distance, first)
        yield Send(peer, _block(fold.place, distance, first)), Recv(peer, theirs)
