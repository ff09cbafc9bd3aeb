"""Cyclic algorithms: all ranks do the same, shifted by their rank.

*Ring*: each rank communicates only with its two neighbours.  *Pairwise*: in step i each rank sends to rank + i and
receives from rank - i; ``size - 1`` steps, and every chunk is sent once, straight to its owner.  *Bruck*:
``ceil(log2(size))`` steps for any size, for small payloads.  *Dissemination*: the barrier in as many steps.

Sources: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009; Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005; Bruck, Ho, Kipnis,
Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE
TPDS 1997; Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 1988.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Copy, Recv, Round, Send, Span, joined, one, wrapped


def ring_reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Leave the sum of chunk ``rank`` on each rank; ``size`` chunks.

    ``size - 1`` steps; each rank sends ``(size - 1) / size`` of the buffer, the least possible.  Chunk c is summed
    around the ring from rank c + 1 to rank c.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for i in range(size - 1):
        yield (
            Send(right, one((rank - i - 1) % size)),
            Recv(left, one((rank - i - 2) % size), reduce=True),
        )


def ring_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Send chunk ``rank`` of each rank to all; ``size`` chunks.

    ``size - 1`` steps; each rank sends ``(size - 1) / size`` of the result, the least possible.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for i in range(size - 1):
        yield Send(right, one((rank - i) % size)), Recv(left, one((rank - i - 1) % size))


def ring_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather; ``size`` chunks.

    ``2 (size - 1)`` steps; each rank sends ``2 (size - 1) / size`` of the buffer, the least possible.
    """
    yield from ring_reduce_scatter(rank, size)
    yield from ring_all_gather(rank, size)


def pairwise_reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Leave the sum of chunk ``rank`` on each rank; ``size`` chunks, of which only that one is written.

    Each rank sends ``(size - 1) / size`` of the buffer, the least possible.
    """
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, one(to)), Recv(source, one(rank), reduce=True)


def pairwise_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Send chunk ``rank`` of each rank to all; ``size`` chunks, each sent ``size - 1`` times by its owner."""
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, one(rank)), Recv(source, one(source))


def pairwise_all_to_all(rank: int, size: int) -> Iterator[Round]:
    """Send chunk r to rank r; the chunk from rank r lands in chunk ``size + r``.

    Each rank sends ``(size - 1) / size`` of the buffer, the least possible.
    """
    yield (Copy(Span(rank, rank + 1), Span(size + rank, size + rank + 1)),)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, one(to)), Recv(source, one(size + source))


def bruck_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Send chunk ``rank`` of each rank to all; ``size`` chunks.

    In each step a rank sends all it has to the rank at distance 1, 2, 4, ... below it.  Each rank sends
    ``(size - 1) / size`` of the result, the least possible.  Chunks land where they belong: no rotation at the end.
    """
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        yield Send(to, wrapped(rank, count, size)), Recv(source, wrapped(source, count, size))
        distance *= 2


def bruck_all_to_all(rank: int, size: int) -> Iterator[Round]:
    """Send chunk r to rank r; the chunk from rank r lands in chunk ``size + r``; from ``2 * size`` on is scratch.

    A chunk that must go ``i`` ranks further is sent in the steps of the bits set in ``i``, so about half of the buffer
    is sent in each step.  In its last step it lands in its place; before, it waits in one of two scratch areas.
    """
    yield (Copy(Span(rank, rank + 1), Span(size + rank, size + rank + 1)),)
    place = {i: (rank + i) % size for i in range(1, size)}
    distance = 1
    while distance < size:
        moving = [i for i in range(1, size) if i & distance]
        landing = {i: _landing(rank, size, i, distance, place[i]) for i in moving}
        yield (
            Send((rank + distance) % size, joined([place[i] for i in moving])),
            Recv((rank - distance) % size, joined([landing[i] for i in moving])),
        )
        place.update(landing)
        distance *= 2


def _landing(rank: int, size: int, i: int, distance: int, here: int) -> int:
    """Return the landing place of the chunk with ``i`` ranks to go that arrives in the step of ``distance``."""
    if i < 2 * distance:
        return size + (rank - i) % size
    return 3 * size + i if 2 * size <= here < 3 * size else 2 * size + i


def dissemination_barrier(rank: int, size: int) -> Iterator[Round]:
    """Notify the rank at distance 1, 2, 4, ... above: after ``ceil(log2(size))`` steps every rank knows of all."""
    distance = 1
    while distance < size:
        yield Send((rank + distance) % size, ()), Recv((rank - distance) % size, ())
        distance *= 2
