"""Which algorithms there are, by operation, and the schedules they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from asyncpar.collectives.algorithms import cyclic, hierarchical, recursive, rooted
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.algorithms.steps import Round, Schedule, schedule
from asyncpar.errors import UsageError

_Plain = Callable[[int, int], Iterator[Round]]
_Rooted = Callable[[int, int, int], Iterator[Round]]

_ALL_REDUCE: dict[str, tuple[_Plain, Callable[[int], int]]] = {
    "ring": (cyclic.ring_all_reduce, lambda size: size),
    "halving": (recursive.halving_all_reduce, recursive.halving_chunks),
    "doubling": (recursive.doubling_all_reduce, lambda size: 1),  # noqa: ARG005
    "tree": (rooted.tree_all_reduce, lambda size: 1),  # noqa: ARG005
}
_HIERARCHICAL: dict[str, tuple[Callable[[int, Hosts], Iterator[Round]], Callable[[Hosts], int]]] = {
    "hierarchical": (hierarchical.all_reduce_by_ring, hierarchical.chunks_by_ring),
    "hierarchical-tree": (hierarchical.all_reduce_by_tree, lambda hosts: 1),  # noqa: ARG005
}
_ACROSS: dict[str, tuple[Callable[[int, Hosts], Iterator[Round]], Callable[[Hosts], int]]] = {
    "hierarchical": (hierarchical.across_by_ring, hierarchical.carriers_by_ring),
    "hierarchical-tree": (hierarchical.across_by_tree, lambda hosts: 1),  # noqa: ARG005
}
_CHUNK_PER_RANK: dict[str, dict[str, _Plain]] = {
    "reduce_scatter": {
        "pairwise": cyclic.pairwise_reduce_scatter,
        "ring": cyclic.ring_reduce_scatter,
        "halving": recursive.halving_reduce_scatter,
    },
    "all_gather": {
        "ring": cyclic.ring_all_gather,
        "bruck": cyclic.bruck_all_gather,
        "halving": recursive.halving_all_gather,
        "pairwise": cyclic.pairwise_all_gather,
    },
}
_ROOTED: dict[str, dict[str, _Rooted]] = {
    "broadcast": {"tree": rooted.tree_broadcast, "chain": rooted.chain_broadcast, "linear": rooted.linear_broadcast},
    "reduce": {"tree": rooted.tree_reduce, "chain": rooted.chain_reduce, "linear": rooted.linear_reduce},
    "gather": {"tree": rooted.tree_gather, "linear": rooted.linear_gather},
    "scatter": {"tree": rooted.tree_scatter, "linear": rooted.linear_scatter},
}
_ALL_TO_ALL: dict[str, tuple[_Plain, Callable[[int], int]]] = {
    "pairwise": (cyclic.pairwise_all_to_all, lambda size: 2 * size),
    "bruck": (cyclic.bruck_all_to_all, lambda size: 4 * size),
}
_BARRIER: dict[str, _Plain] = {"dissemination": cyclic.dissemination_barrier, "tree": rooted.tree_barrier}

KNOWN: dict[str, tuple[str, ...]] = {
    "all_reduce": (*_ALL_REDUCE, *_HIERARCHICAL),
    **{name: tuple(makers) for name, makers in _CHUNK_PER_RANK.items()},
    **{name: tuple(makers) for name, makers in _ROOTED.items()},
    "all_to_all": tuple(_ALL_TO_ALL),
    "barrier": tuple(_BARRIER),
}
"""Operations, and the names of their algorithms by messages."""

ARENA = "arena"
"""No schedule of messages, but programs on shared memory.  Every operation has it where all ranks share an arena."""

CHUNKS_ON_ONE_RANK = frozenset({"gather", "scatter"})
"""Rooted operations whose buffer has a chunk per rank."""


def check_algorithm(operation: str, algorithm: str) -> None:
    """Raise ``UsageError`` unless ``algorithm`` is one of ``operation``."""
    known = KNOWN.get(operation)
    if known is None:
        raise UsageError(f"operation: expected one of {', '.join(KNOWN)}, got {operation!r}")
    if algorithm not in known and algorithm != ARENA:
        raise UsageError(f"algorithm: {operation} has {', '.join((*known, ARENA))}; got {algorithm!r}")


@lru_cache(maxsize=512)
def schedule_of(
    operation: str, algorithm: str, *, rank: int, size: int, root: int = 0, hosts: Hosts | None = None
) -> Schedule:
    """Return the schedule of ``rank``; ``hosts`` matter to the hierarchical algorithms only (None: a single host)."""
    check_algorithm(operation, algorithm)
    if algorithm == ARENA:
        raise UsageError("algorithm: arena has no schedule of messages")
    if operation == "all_reduce" and algorithm in _HIERARCHICAL:
        by_host, count_hosts = _HIERARCHICAL[algorithm]
        hosts = hosts or (tuple(range(size)),)
        return schedule(count_hosts(hosts), by_host(rank, hosts))
    if operation == "all_reduce":
        plain, count = _ALL_REDUCE[algorithm]
        return schedule(count(size), plain(rank, size))
    if operation in _CHUNK_PER_RANK:
        return schedule(size, _CHUNK_PER_RANK[operation][algorithm](rank, size))
    if operation in _ROOTED:
        chunks = size if operation in CHUNKS_ON_ONE_RANK else 1
        return schedule(chunks, _ROOTED[operation][algorithm](rank, size, root))
    if operation == "all_to_all":
        plain, count = _ALL_TO_ALL[algorithm]
        return schedule(count(size), plain(rank, size))
    return schedule(0, _BARRIER[algorithm](rank, size))


def is_hierarchical(algorithm: str) -> bool:
    """Does ``algorithm`` treat hosts apart from the network between them?"""
    return algorithm in _HIERARCHICAL


@lru_cache(maxsize=512)
def schedule_across(algorithm: str, *, rank: int, hosts: Hosts) -> Schedule:
    """Return what a hierarchical all-reduce sends between hosts: messages for messages what ``schedule_of`` has."""
    across, _ = _ACROSS[algorithm]
    _, count_chunks = _HIERARCHICAL[algorithm]
    return schedule(count_chunks(hosts), across(rank, hosts))


def carriers_of(algorithm: str, hosts: Hosts) -> int:
    """Return how many ranks of each host talk to other hosts in a hierarchical all-reduce; each has a part of it."""
    return _ACROSS[algorithm][1](hosts)
