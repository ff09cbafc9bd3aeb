"""The work of an algorithm: of its busiest rank, and the bytes that all ranks send.  Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

PIECE_BYTES = 1 << 20
"""Size in bytes of the pieces that chains work on."""


class AlgorithmWork(msgspec.Struct, frozen=True):
    """Work of the busiest rank: message times, bytes moved in sequence, bytes combined.

    ``total`` is the number of bytes that all ranks send together, which counts where they share too few cores; 0:
    unknown.
    """

    steps: float
    moved: float
    combined: float = 0.0
    total: float = 0.0


WorkOf = Callable[[int, float], AlgorithmWork]
"""The work of an algorithm on ``size`` ranks, at least 2, over ``payload`` bytes, the largest buffer of any rank."""


def _share(size: int, payload: float) -> float:
    return payload * (size - 1) / size


def _once(size: int, payload: float) -> float:
    """Return the bytes that all ranks send if each sends its share, or all but one send everything."""
    return (size - 1) * payload


def _hops(size: int) -> int:
    """Return the number of sends by which chunks reach all distances below ``size``, by powers of two."""
    return sum(distance.bit_count() for distance in range(size))


def _log(size: int) -> int:
    return (size - 1).bit_length()


def _folded(size: int, work: Callable[[int], AlgorithmWork], payload: float) -> AlgorithmWork:
    """Return ``work`` on the largest power of two, plus the work of folding the other ranks."""
    power = 1 << (size.bit_length() - 1)
    inner = work(power)
    if power == size:
        return inner
    total = inner.total + 2 * (size - power) * payload
    return AlgorithmWork(inner.steps + 2, inner.moved + 2 * payload, inner.combined + payload, total)


# -- all_reduce ------------------------------------------------------------------------------------------------------


def ring_all_reduce(size: int, payload: float) -> AlgorithmWork:
    share = _share(size, payload)
    return AlgorithmWork(2 * (size - 1), 2 * share, share, 2 * _once(size, payload))


def halving_all_reduce(size: int, payload: float) -> AlgorithmWork:
    def of_power(n: int) -> AlgorithmWork:
        share = _share(n, payload)
        return AlgorithmWork(2 * _log(n), 2 * share, share, 2 * _once(n, payload))

    return _folded(size, of_power, payload)


def doubling_all_reduce(size: int, payload: float) -> AlgorithmWork:
    def of_power(n: int) -> AlgorithmWork:
        moved = payload * _log(n)
        return AlgorithmWork(_log(n), moved, moved, n * moved)

    return _folded(size, of_power, payload)


def tree_all_reduce(size: int, payload: float) -> AlgorithmWork:
    return AlgorithmWork(2 * _log(size), 2 * _log(size) * payload, _log(size) * payload, 2 * _once(size, payload))


# -- a chunk per rank ------------------------------------------------------------------------------------------------


def gathering(size: int, payload: float) -> AlgorithmWork:
    return AlgorithmWork(size - 1, _share(size, payload), total=_once(size, payload))


def bruck_all_gather(size: int, payload: float) -> AlgorithmWork:
    moved = 1.5 * _share(size, payload)  # wrapped chunks are packed and unpacked
    return AlgorithmWork(_log(size), moved, total=_once(size, payload))


def halving_all_gather(size: int, payload: float) -> AlgorithmWork:
    share = _share(size, payload)
    work = _folded(size, lambda n: AlgorithmWork(_log(n), 1.5 * share), payload)  # packed, too
    return replace(work, total=_once(size, payload))


def ring_reduce_scatter(size: int, payload: float) -> AlgorithmWork:
    share = _share(size, payload)
    return AlgorithmWork(size - 1, 1.25 * share, share, _once(size, payload))  # works on a copy of the input


def pairwise_reduce_scatter(size: int, payload: float) -> AlgorithmWork:
    share = _share(size, payload)
    return AlgorithmWork(size - 1, share, share, _once(size, payload))


def halving_reduce_scatter(size: int, payload: float) -> AlgorithmWork:
    share = _share(size, payload)
    work = _folded(size, lambda n: AlgorithmWork(_log(n), 1.5 * share, share), payload)  # packed, too
    folded = size - (1 << (size.bit_length() - 1))  # ranks whose chunk comes back to them
    return replace(work, total=_once(size, payload) + folded * payload / size)


# -- a root ----------------------------------------------------------------------------------------------------------


def tree_of_chunks(size: int, payload: float) -> AlgorithmWork:
    return AlgorithmWork(_log(size), 2 * _share(size, payload), total=_hops(size) * payload / size)


def linear_chunks(size: int, payload: float) -> AlgorithmWork:
    share = _share(size, payload)
    return AlgorithmWork(1 + 0.25 * (size - 2), share, total=share)


def tree_broadcast(size: int, payload: float) -> AlgorithmWork:
    return AlgorithmWork(_log(size), _log(size) * payload, total=_once(size, payload))


def chain_broadcast(size: int, payload: float) -> AlgorithmWork:
    moved = payload + min(payload, PIECE_BYTES) * (size - 2)
    return AlgorithmWork(size - 1, moved, total=_once(size, payload))


def linear_broadcast(size: int, payload: float) -> AlgorithmWork:
    moved = _once(size, payload)
    return AlgorithmWork(1 + 0.25 * (size - 2), moved, total=moved)


def tree_reduce(size: int, payload: float) -> AlgorithmWork:
    return AlgorithmWork(_log(size), _log(size) * payload, _log(size) * payload, _once(size, payload))


def chain_reduce(size: int, payload: float) -> AlgorithmWork:
    moved = payload + min(payload, PIECE_BYTES) * (size - 2)
    return AlgorithmWork(size - 1, moved, moved, _once(size, payload))


def linear_reduce(size: int, payload: float) -> AlgorithmWork:
    moved = _once(size, payload)
    return AlgorithmWork(size - 1, moved, moved, moved)


# -- others ----------------------------------------------------------------------------------------------------------


def bruck_all_to_all(size: int, payload: float) -> AlgorithmWork:
    half = _log(size) * payload / 2  # half of the buffer per step, packed and unpacked
    return AlgorithmWork(_log(size), 3 * half, total=_hops(size) * payload)


def dissemination_barrier(size: int, payload: float) -> AlgorithmWork:  # noqa: ARG001
    return AlgorithmWork(_log(size), 0)


def tree_barrier(size: int, payload: float) -> AlgorithmWork:  # noqa: ARG001
    return AlgorithmWork(2 * _log(size), 0)
