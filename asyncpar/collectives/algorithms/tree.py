"""Binomial trees: ``ceil(log2(size))`` steps.

Ranks are numbered from the root on (``(rank - root) % size``).  A number's children are itself plus 1, 2, 4, ... below
its lowest set bit, and its parent is itself without that bit.  Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Recv, Round, Send, emptied, one, wrapped


class _Place:
    """The place of a rank in the binomial tree of ``root``."""

    def __init__(self, rank: int, size: int, root: int) -> None:
        self.number = (rank - root) % size
        self._size = size
        self._root = root

    def rank_of(self, number: int) -> int:
        return (number + self._root) % self._size

    def parent(self) -> int | None:
        return self.number & (self.number - 1) if self.number else None

    def children(self) -> list[int]:
        """Return the numbers of the children, nearest first."""
        reach = self.number & -self.number or self._size
        distances = (1 << bit for bit in range(self._size.bit_length()))
        return [
            self.number + distance for distance in distances if distance < reach and self.number + distance < self._size
        ]

    def weight(self, number: int) -> int:
        """Return how many ranks the subtree of ``number`` holds."""
        reach = number & -number or self._size
        return min(reach, self._size - number)


def reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Sum up the tree to ``root``; one chunk.  Every rank but the root sends the whole buffer once."""
    place = _Place(rank, size, root)
    for child in place.children():
        yield (Recv(place.rank_of(child), one(0), reduce=True),)
    parent = place.parent()
    if parent is not None:
        yield (Send(place.rank_of(parent), one(0)),)


def broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Hand the buffer of ``root`` down the tree; one chunk.  The root sends it ``ceil(log2(size))`` times."""
    place = _Place(rank, size, root)
    parent = place.parent()
    if parent is not None:
        yield (Recv(place.rank_of(parent), one(0)),)
    for child in reversed(place.children()):
        yield (Send(place.rank_of(child), one(0)),)


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Sum up the tree to rank 0, hand the result down; one chunk, ``2 ceil(log2(size))`` steps."""
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)


def gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Collect chunk r of each rank r at ``root``; every rank sends the chunks of its subtree once."""
    place = _Place(rank, size, root)
    for child in place.children():
        yield (Recv(place.rank_of(child), wrapped(place.rank_of(child), place.weight(child), size)),)
    parent = place.parent()
    if parent is not None:
        yield (Send(place.rank_of(parent), wrapped(rank, place.weight(place.number), size)),)


def scatter(rank: int, size: int, root: int) -> Iterator[Round]:
    """Hand chunk r of ``root`` to each rank r: down the tree, the chunks of a whole subtree at once."""
    place = _Place(rank, size, root)
    parent = place.parent()
    if parent is not None:
        yield (Recv(place.rank_of(parent), wrapped(rank, place.weight(place.number), size)),)
    for child in reversed(place.children()):
        yield (Send(place.rank_of(child), wrapped(place.rank_of(child), place.weight(child), size)),)


def barrier(rank: int, size: int) -> Iterator[Round]:
    """Send nothing up the tree to rank 0 and nothing down again: rank 0 has then heard of all, and all of it."""
    yield from emptied(all_reduce(rank, size))
