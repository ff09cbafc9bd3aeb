"""Recursive halving and doubling: the least traffic in the fewest steps.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncpar.collectives.algorithms.fold import Fold
from asyncpar.collectives.algorithms.steps import Recv, Round, Send, Span, Spans, one, span


def chunks_of_all_reduce(size: int) -> int:
    """Return the number of chunks that ``all_reduce`` works on: the largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Halve the buffer with partners at distance size/2, ..., 1 and sum; then double it back.

    ``2 log2(size)`` steps; each rank sends ``2 (size - 1) / size`` of the buffer, the least possible.  For other sizes
    than powers of two the surplus ranks are folded into neighbours: two steps and one whole buffer more for them.
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


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
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


def all_gather(rank: int, size: int) -> Iterator[Round]:
    """Spread chunk ``rank`` of each rank to all; ``size`` chunks, ``log2(size)`` steps (two more when folded)."""
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
