"""Bruck's algorithms: ``ceil(log2(size))`` steps for any size, for small payloads.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 1997.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Copy, Recv, Round, Send, Span, joined, wrapped


def all_gather(rank: int, size: int) -> Iterator[Round]:
    """Spread chunk ``rank`` of each rank to all; ``size`` chunks.

    In each step a rank sends all it has to the rank at distance 1, 2, 4, ... below it.  Each rank sends
    ``(size - 1) / size`` of the result, the least possible.  Chunks land where they belong: no rotation at the end.
    """
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        yield Send(to, wrapped(rank, count, size)), Recv(source, wrapped(source, count, size))
        distance *= 2


def all_to_all(rank: int, size: int) -> Iterator[Round]:
    """Send chunk r to rank r; what rank r sends lands in chunk ``size + r``; chunks from ``2 * size`` on are scratch.

    A chunk that must go ``i`` ranks further travels in the steps of the bits set in ``i``, so about half of the buffer
    is sent in each step.  On its last step it lands in its place; before, it waits in one of two scratch areas.
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
    """Return where the chunk with ``i`` to go lands that arrives in the step of ``distance``."""
    if i < 2 * distance:
        return size + (rank - i) % size
    return 3 * size + i if 2 * size <= here < 3 * size else 2 * size + i
