"""The dissemination barrier.

Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 1988.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Recv, Round, Send


def barrier(rank: int, size: int) -> Iterator[Round]:
    """Tell the rank at distance 1, 2, 4, ... above: after ``ceil(log2(size))`` steps all have heard of all."""
    distance = 1
    while distance < size:
        yield Send((rank + distance) % size, ()), Recv((rank - distance) % size, ())
        distance *= 2
