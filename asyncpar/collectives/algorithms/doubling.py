"""Recursive doubling of whole buffers: the fewest steps, for payloads that cost only latency.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.fold import Fold
from asyncpar.collectives.algorithms.steps import Recv, Round, Send, one


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Exchange the whole buffer with a partner at distance 1, 2, 4, ... and sum; one chunk.

    ``log2(size)`` steps, each sending the whole buffer.  Other sizes than powers of two first fold the surplus ranks
    into neighbours and hand them the result at the end: two steps more.  Both partners combine the same two operands
    in rank order, so all ranks end with the same bits.
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
