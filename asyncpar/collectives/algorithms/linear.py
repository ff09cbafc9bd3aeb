"""Linear algorithms: the root talks to every rank itself.  One step of latency, and the root does all the work."""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms.steps import Recv, Round, Send, one


def _others(size: int, root: int) -> list[int]:
    return [(root + distance) % size for distance in range(1, size)]


def broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send the buffer of ``root`` to each rank; one chunk, which the root sends ``size - 1`` times."""
    if rank == root:
        yield tuple(Send(peer, one(0)) for peer in _others(size, root))
    else:
        yield (Recv(root, one(0)),)


def reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Sum at ``root`` what each rank sends, in the order of ranks from the root on; one chunk."""
    if rank == root:
        for peer in _others(size, root):
            yield (Recv(peer, one(0), reduce=True),)
    else:
        yield (Send(root, one(0)),)


def gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Collect chunk r of each rank r at ``root``; each rank sends its chunk once, the least possible."""
    if rank == root:
        yield tuple(Recv(peer, one(peer)) for peer in _others(size, root))
    else:
        yield (Send(root, one(rank)),)


def scatter(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send chunk r of ``root`` to each rank r.

    The root sends ``(size - 1) / size`` of the buffer, the least possible.
    """
    if rank == root:
        yield tuple(Send(peer, one(peer)) for peer in _others(size, root))
    else:
        yield (Recv(root, one(rank)),)
