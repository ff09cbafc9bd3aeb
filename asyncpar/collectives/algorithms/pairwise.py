"""Pairwise exchange: in step i each rank sends to rank + i and receives from rank - i.

``size - 1`` steps, every chunk travels once and straight to its owner.  Source: Thakur, Rabenseifner and Gropp,
IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Copy, Recv, Round, Send, Span, one


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Leave the sum of chunk ``rank`` on each rank; ``size`` chunks, of which only that one is written.

    Each rank sends ``(size - 1) / size`` of the buffer, the least possible.
    """
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, one(to)), Recv(source, one(rank), reduce=True)


def all_gather(rank: int, size: int) -> Iterator[Round]:
    """Spread chunk ``rank`` of each rank to all; ``size`` chunks, each sent ``size - 1`` times by its owner."""
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, one(rank)), Recv(source, one(source))


def all_to_all(rank: int, size: int) -> Iterator[Round]:
    """Send chunk r to rank r; what rank r sends lands in chunk ``size + r``.

    Each rank sends ``(size - 1) / size`` of the buffer, the least possible.
    """
    yield (Copy(Span(rank, rank + 1), Span(size + rank, size + rank + 1)),)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, one(to)), Recv(source, one(size + source))
