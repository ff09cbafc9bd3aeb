"""Ring algorithms: every rank talks to its two neighbours only.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009; Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Recv, Round, Send, one


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
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


def all_gather(rank: int, size: int) -> Iterator[Round]:
    """Spread chunk ``rank`` of each rank to all; ``size`` chunks.

    ``size - 1`` steps; each rank sends ``(size - 1) / size`` of the result, the least possible.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for i in range(size - 1):
        yield Send(right, one((rank - i) % size)), Recv(left, one((rank - i - 1) % size))


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather; ``size`` chunks.

    ``2 (size - 1)`` steps; each rank sends ``2 (size - 1) / size`` of the buffer, the least possible.
    """
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)
