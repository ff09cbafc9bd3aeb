"""Chains: every rank hands the buffer to the next.

Long payloads are cut into pieces that follow one another down the chain, so all ranks work at once and each sends the
payload once, the least possible.  Source: Patarasu, Faraj and Yuan, "Pipelined broadcast on Ethernet switched
clusters", JPDC 2008.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Recv, Round, Send, one


def broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Hand the buffer of ``root`` from rank to rank; one chunk, ``size - 1`` steps."""
    number = (rank - root) % size
    if number > 0:
        yield (Recv((rank - 1) % size, one(0)),)
    if number < size - 1:
        yield (Send((rank + 1) % size, one(0)),)


def reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Sum from the last rank to ``root``, each adding its own; one chunk, ``size - 1`` steps."""
    number = (rank - root) % size
    if number < size - 1:
        yield (Recv((rank + 1) % size, one(0), reduce=True),)
    if number > 0:
        yield (Send((rank - 1) % size, one(0)),)
