"""The algorithms of each operation, and their schedules.

``register_algorithm`` adds one: it is proved on up to eight ranks first, and is then equal to those below: it has a
place in the cost model, pins, ``algorithm="name"``, ``Communicator.algorithm_table``.  All ranks register the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from asyncpar.collectives.algorithms import cyclic, hierarchical, recursive, rooted, work
from asyncpar.collectives.algorithms.check import ScheduleError, verify
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.algorithms.steps import RankSchedule, Round, schedule
from asyncpar.collectives.algorithms.work import AlgorithmWork, WorkOf
from asyncpar.core.config.registry import Registry
from asyncpar.errors import UsageError

_HIERARCHICAL: dict[str, tuple[Callable[[int, Hosts], Iterator[Round]], Callable[[Hosts], int]]] = {
    "hierarchical": (hierarchical.all_reduce_by_ring, hierarchical.chunks_by_ring),
    "hierarchical-tree": (hierarchical.all_reduce_by_tree, lambda hosts: 1),  # noqa: ARG005
}
_ACROSS: dict[str, tuple[Callable[[int, Hosts], Iterator[Round]], Callable[[Hosts], int]]] = {
    "hierarchical": (hierarchical.across_by_ring, hierarchical.leaders_by_ring),
    "hierarchical-tree": (hierarchical.across_by_tree, lambda hosts: 1),  # noqa: ARG005
}


def _one_per_rank(size: int) -> int:
    return size


def _single(size: int) -> int:  # noqa: ARG001
    return 1


def _none(size: int) -> int:  # noqa: ARG001
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm for one operation, by messages.

    ``rounds(rank, size)``, with the root as third argument where the operation has one, yields the rounds of a rank.
    ``work(size, payload)`` is the input of the cost model.  ``chunks(size)`` is the number of chunks that the buffer is
    cut into; it is fixed for operations with a chunk per rank.
    """

    operation: str
    name: str
    rounds: Callable[..., Iterator[Round]]
    work: WorkOf
    chunks: Callable[[int], int] = _single


_Rounds = Callable[..., Iterator[Round]]
_Chunks = Callable[[int], int]


def _of(operation: str, *listed: tuple[str, _Rounds, WorkOf, _Chunks]) -> Registry[Algorithm]:
    records = (
        Algorithm(operation=operation, name=name, rounds=rounds, work=needed, chunks=chunks)
        for name, rounds, needed, chunks in listed
    )
    return Registry(f"algorithm of {operation}", records, reserved=("arena", *_HIERARCHICAL))


ALGORITHMS: Mapping[str, Registry[Algorithm]] = MappingProxyType(
    {
        "all_reduce": _of(
            "all_reduce",
            ("ring", cyclic.ring_all_reduce, work.ring_all_reduce, _one_per_rank),
            ("halving", recursive.halving_all_reduce, work.halving_all_reduce, recursive.halving_chunks),
            ("doubling", recursive.doubling_all_reduce, work.doubling_all_reduce, _single),
            ("tree", rooted.tree_all_reduce, work.tree_all_reduce, _single),
        ),
        "reduce_scatter": _of(
            "reduce_scatter",
            ("pairwise", cyclic.pairwise_reduce_scatter, work.pairwise_reduce_scatter, _one_per_rank),
            ("ring", cyclic.ring_reduce_scatter, work.ring_reduce_scatter, _one_per_rank),
            ("halving", recursive.halving_reduce_scatter, work.halving_reduce_scatter, _one_per_rank),
        ),
        "all_gather": _of(
            "all_gather",
            ("ring", cyclic.ring_all_gather, work.gathering, _one_per_rank),
            ("bruck", cyclic.bruck_all_gather, work.bruck_all_gather, _one_per_rank),
            ("halving", recursive.halving_all_gather, work.halving_all_gather, _one_per_rank),
            ("pairwise", cyclic.pairwise_all_gather, work.gathering, _one_per_rank),
        ),
        "broadcast": _of(
            "broadcast",
            ("tree", rooted.tree_broadcast, work.tree_broadcast, _single),
            ("chain", rooted.chain_broadcast, work.chain_broadcast, _single),
            ("linear", rooted.linear_broadcast, work.linear_broadcast, _single),
        ),
        "reduce": _of(
            "reduce",
            ("tree", rooted.tree_reduce, work.tree_reduce, _single),
            ("chain", rooted.chain_reduce, work.chain_reduce, _single),
            ("linear", rooted.linear_reduce, work.linear_reduce, _single),
        ),
        "gather": _of(
            "gather",
            ("tree", rooted.tree_gather, work.tree_of_chunks, _one_per_rank),
            ("linear", rooted.linear_gather, work.linear_chunks, _one_per_rank),
        ),
        "scatter": _of(
            "scatter",
            ("tree", rooted.tree_scatter, work.tree_of_chunks, _one_per_rank),
            ("linear", rooted.linear_scatter, work.linear_chunks, _one_per_rank),
        ),
        "all_to_all": _of(
            "all_to_all",
            ("pairwise", cyclic.pairwise_all_to_all, work.gathering, lambda size: 2 * size),
            ("bruck", cyclic.bruck_all_to_all, work.bruck_all_to_all, lambda size: 4 * size),
        ),
        "barrier": _of(
            "barrier",
            ("dissemination", cyclic.dissemination_barrier, work.dissemination_barrier, _none),
            ("tree", rooted.tree_barrier, work.tree_barrier, _none),
        ),
    }
)
"""The algorithms by messages of each operation, except hierarchical ones."""

NCCL = "nccl"
STAGED = "staged"
HIERARCHICAL = "hierarchical"
DEVICE_ALGORITHMS = (NCCL, HIERARCHICAL, STAGED)
"""Algorithms of device arrays: by NCCL; by NCCL on each host and the host's lanes between hosts; copied to the host,
moved by the host's algorithms, and copied back."""

HIERARCHICAL_ON_DEVICES = frozenset({"all_reduce", "broadcast"})
"""Operations on device arrays that can go by host."""


def is_of_devices(operation: str, algorithm: str) -> bool:
    """Return whether ``algorithm`` is one of ``operation`` on device arrays."""
    if algorithm == HIERARCHICAL:
        return operation in HIERARCHICAL_ON_DEVICES
    return algorithm in DEVICE_ALGORITHMS


ARENA = "arena"
"""No schedule of messages, but programs on shared memory.  Every operation has it if all ranks share an arena."""

CHUNKS_ON_ONE_RANK = frozenset({"gather", "scatter"})
"""Rooted operations whose buffer has a chunk per rank."""


_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_PROVED_SIZES = range(1, 9)


def register_algorithm(algorithm: Algorithm) -> None:
    """Register ``algorithm`` for its operation, in this process.

    Raises ``UsageError`` for an unknown operation, a name that is taken, work that is not finite, and a schedule that a
    symbolic run on up to 8 ranks proves wrong.
    """
    registry = ALGORITHMS.get(algorithm.operation)
    if registry is None:
        raise UsageError(f"operation: expected one of {', '.join(ALGORITHMS)}, got {algorithm.operation!r}")
    registry.check(algorithm.name)
    _prove(algorithm)
    registry.register(algorithm)


def unregister_algorithm(operation: str, name: str) -> None:
    """Remove an algorithm.  Raises ``UsageError`` if there is none of this name."""
    if operation not in ALGORITHMS:
        raise UsageError(f"operation: expected one of {', '.join(ALGORITHMS)}, got {operation!r}")
    ALGORITHMS[operation].unregister(name)


def _prove(algorithm: Algorithm) -> None:
    what = f"algorithm {algorithm.name!r} of {algorithm.operation}"
    for size in _PROVED_SIZES:
        for root in range(size) if algorithm.operation in _ROOTED else (0,):
            schedules = [_plan(algorithm, rank, size, root) for rank in range(size)]
            try:
                verify(algorithm.operation, schedules, root=root)
            except ScheduleError as error:
                raise UsageError(f"{what}: rounds: wrong on {size} ranks: {error}; correct the schedule") from error
        needed: object = algorithm.work(size, 1.0) if size > 1 else AlgorithmWork(0, 0)
        if not isinstance(needed, AlgorithmWork) or not all(0 <= one < float("inf") for one in _figures(needed)):
            raise UsageError(
                f"{what}: work: expected an AlgorithmWork of finite figures from 0, got {needed!r} for {size} ranks"
            )


def _figures(needed: AlgorithmWork) -> tuple[float, float, float]:
    return needed.steps, needed.moved, needed.combined


def known_algorithms(operation: str) -> tuple[str, ...]:
    """Return the names of the algorithms by messages of ``operation``; none for an unknown one."""
    registry = ALGORITHMS.get(operation)
    if registry is None:
        return ()
    return (*registry.names, *_HIERARCHICAL) if operation == "all_reduce" else registry.names


def check_algorithm(operation: str, algorithm: str) -> None:
    """Raise ``UsageError`` unless ``algorithm`` is one of ``operation``."""
    registry = ALGORITHMS.get(operation)
    if registry is None:
        raise UsageError(f"operation: expected one of {', '.join(ALGORITHMS)}, got {operation!r}")
    if algorithm in registry.kinds or algorithm == ARENA:
        return
    if operation != "all_reduce" or algorithm not in _HIERARCHICAL:
        known = (*known_algorithms(operation), ARENA)
        raise UsageError(f"algorithm: {operation} has {', '.join(known)}; got {algorithm!r}")


def work_of(operation: str, algorithm: str, size: int, payload: float) -> AlgorithmWork:
    """Return the work of an operation over ``payload`` bytes, the largest buffer of any rank, if not hierarchical."""
    check_algorithm(operation, algorithm)
    found = ALGORITHMS[operation].get(algorithm)
    if found is None:
        raise UsageError(f"algorithm: expected one of {', '.join(ALGORITHMS[operation].names)}, got {algorithm!r}")
    return AlgorithmWork(0, 0) if size == 1 else found.work(size, payload)


def schedule_of(
    operation: str, algorithm: str, *, rank: int, size: int, root: int = 0, hosts: Hosts | None = None
) -> RankSchedule:
    """Return the schedule of ``rank``; ``hosts`` matter only to hierarchical algorithms (None: a single host)."""
    check_algorithm(operation, algorithm)
    if algorithm == ARENA:
        raise UsageError("algorithm: arena has no schedule of messages")
    found = ALGORITHMS[operation].get(algorithm)
    if found is not None:
        return _plan(found, rank, size, root)
    return _hierarchical_plan(algorithm, rank, hosts or (tuple(range(size)),))


@lru_cache(maxsize=512)
def _hierarchical_plan(algorithm: str, rank: int, hosts: Hosts) -> RankSchedule:
    by_host, count_hosts = _HIERARCHICAL[algorithm]
    return schedule(count_hosts(hosts), by_host(rank, hosts))


@lru_cache(maxsize=512)
def _plan(algorithm: Algorithm, rank: int, size: int, root: int) -> RankSchedule:
    place = (rank, size, root) if algorithm.operation in _ROOTED else (rank, size)
    return schedule(algorithm.chunks(size), algorithm.rounds(*place))


def is_hierarchical(algorithm: str) -> bool:
    """Return whether ``algorithm``, which may include a message size, distinguishes hosts from their network."""
    return algorithm.partition("/")[0] in _HIERARCHICAL


@lru_cache(maxsize=512)
def schedule_across(algorithm: str, *, rank: int, hosts: Hosts) -> RankSchedule:
    """Return the messages between hosts of a hierarchical all-reduce, exactly as in the schedule of ``schedule_of``."""
    across, _ = _ACROSS[algorithm]
    _, count_chunks = _HIERARCHICAL[algorithm]
    return schedule(count_chunks(hosts), across(rank, hosts))


def leaders_of(algorithm: str, hosts: Hosts) -> int:
    """Return the number of ranks per host that exchange parts with other hosts in a hierarchical all-reduce."""
    return _ACROSS[algorithm][1](hosts)
