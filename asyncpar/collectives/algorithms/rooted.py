"""Algorithms between a root and all others: binomial trees, chains, and linear algorithms.

*Tree*: ``ceil(log2(size))`` steps.  Ranks are numbered from the root on: ``(rank - root) % size``.  The children of a
number are itself plus 1, 2, 4, ... below its lowest set bit, and its parent is itself without that bit.  *Chain*: every
rank passes the buffer to the next; pieces of a long payload follow one another, so all ranks work at once and each
sends the payload once, the least possible.  *Linear*: the root communicates with every rank directly, in one step.

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 2005; Patarasu, Faraj and Yuan, "Pipelined broadcast on Ethernet
switched clusters", JPDC 2008.
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
        """Return the number of ranks in the subtree of ``number``."""
        reach = number & -number or self._size
        return min(reach, self._size - number)


def tree_reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Sum up the tree to ``root``; one chunk.  Every rank but the root sends the whole buffer once."""
    place = _Place(rank, size, root)
    for child in place.children():
        yield (Recv(place.rank_of(child), one(0), reduce=True),)
    parent = place.parent()
    if parent is not None:
        yield (Send(place.rank_of(parent), one(0)),)


def tree_broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send the buffer of ``root`` down the tree; one chunk.  The root sends it ``ceil(log2(size))`` times."""
    place = _Place(rank, size, root)
    parent = place.parent()
    if parent is not None:
        yield (Recv(place.rank_of(parent), one(0)),)
    for child in reversed(place.children()):
        yield (Send(place.rank_of(child), one(0)),)


def tree_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Sum up the tree to rank 0, and send the result down; one chunk, ``2 ceil(log2(size))`` steps."""
    yield from tree_reduce(rank, size, 0)
    yield from tree_broadcast(rank, size, 0)


def tree_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Collect chunk r of each rank r at ``root``; every rank sends the chunks of its subtree once."""
    place = _Place(rank, size, root)
    for child in place.children():
        yield (Recv(place.rank_of(child), wrapped(place.rank_of(child), place.weight(child), size)),)
    parent = place.parent()
    if parent is not None:
        yield (Send(place.rank_of(parent), wrapped(rank, place.weight(place.number), size)),)


def tree_scatter(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send chunk r of ``root`` to each rank r: down the tree, the chunks of a whole subtree at once."""
    place = _Place(rank, size, root)
    parent = place.parent()
    if parent is not None:
        yield (Recv(place.rank_of(parent), wrapped(rank, place.weight(place.number), size)),)
    for child in reversed(place.children()):
        yield (Send(place.rank_of(child), wrapped(place.rank_of(child), place.weight(child), size)),)


def tree_barrier(rank: int, size: int) -> Iterator[Round]:
    """Send empty messages up the tree to rank 0 and down again: rank 0 then knows of all ranks, and all of it."""
    yield from emptied(tree_all_reduce(rank, size))


def chain_broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Pass the buffer of ``root`` from rank to rank; one chunk, ``size - 1`` steps."""
    number = (rank - root) % size
    if number > 0:
        yield (Recv((rank - 1) % size, one(0)),)
    if number < size - 1:
        yield (Send((rank + 1) % size, one(0)),)


def chain_reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Sum from the last rank to ``root``, each adding its own; one chunk, ``size - 1`` steps."""
    number = (rank - root) % size
    if number < size - 1:
        yield (Recv((rank + 1) % size, one(0), reduce=True),)
    if number > 0:
        yield (Send((rank - 1) % size, one(0)),)


def _others(size: int, root: int) -> list[int]:
    return [(root + distance) % size for distance in range(1, size)]


def linear_broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send the buffer of ``root`` to each rank; one chunk, which the root sends ``size - 1`` times."""
    if rank == root:
        yield tuple(Send(peer, one(0)) for peer in _others(size, root))
    else:
        yield (Recv(root, one(0)),)


def linear_reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Sum the buffers of all ranks at ``root``, in the order of ranks from the root on; one chunk."""
    if rank == root:
        for peer in _others(size, root):
            yield (Recv(peer, one(0), reduce=True),)
    else:
        yield (Send(root, one(0)),)


def linear_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Collect chunk r of each rank r at ``root``; each rank sends its chunk once, the least possible."""
    if rank == root:
        yield tuple(Recv(peer, one(peer)) for peer in _others(size, root))
    else:
        yield (Send(root, one(rank)),)


def linear_scatter(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send chunk r of ``root`` to each rank r.

    The root sends ``(size - 1) / size`` of the buffer, the least possible.
    """
    if rank == root:
        yield tuple(Send(peer, one(peer)) for peer in _others(size, root))
    else:
        yield (Recv(root, one(rank)),)
