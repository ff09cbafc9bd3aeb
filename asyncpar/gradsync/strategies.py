"""Which all-reduce a communication strategy stands for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from asyncpar.codecs import Identity, RoundCodec
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.communicator import Communicator
from asyncpar.config.parallel import CommunicationStrategy
from asyncpar.gradsync.config import AnyCodec

ARENA = "arena"
HALVING = "halving"

_FIXED: Mapping[CommunicationStrategy, str] = MappingProxyType(
    {
        CommunicationStrategy.RING_ALL_REDUCE: "ring",
        CommunicationStrategy.TREE_ALL_REDUCE: "tree",
        CommunicationStrategy.HIERARCHICAL_ALL_REDUCE: "hierarchical",
    }
)


def least_bytes(nbytes: int, communicator: Communicator) -> int:
    """Return what a rank sends in an all-reduce of ``nbytes`` that sends as little as can be.

    In shared memory every rank shows the others its array, once; otherwise it is 2 (ranks - 1) / ranks of it.
    """
    if ARENA in communicator.algorithms("all_reduce"):
        return nbytes
    return 2 * (communicator.size - 1) * nbytes // communicator.size


def algorithm_of(strategy: CommunicationStrategy, communicator: Communicator) -> str | None:
    """Return the algorithm of ``strategy`` for whole gradients; None lets the cost model choose for each bucket.

    ALL_REDUCE is one algorithm whatever the size, that of least traffic where ranks are as they are: shared memory
    where they have it in common, hosts first where some share one, else recursive halving and doubling for powers of
    two and the ring for other numbers of ranks; or what is pinned.
    """
    if strategy is CommunicationStrategy.ADAPTIVE:
        return None
    if strategy is not CommunicationStrategy.ALL_REDUCE:
        return _FIXED[strategy]
    if communicator.is_pinned("all_reduce"):
        return None
    if ARENA in communicator.algorithms("all_reduce"):
        return ARENA
    if 1 < len(communicator.hosts) < communicator.size:
        return _FIXED[CommunicationStrategy.HIERARCHICAL_ALL_REDUCE]
    is_power_of_two = communicator.size & (communicator.size - 1) == 0
    return HALVING if is_power_of_two else _FIXED[CommunicationStrategy.RING_ALL_REDUCE]


def is_alike(
    strategy: CommunicationStrategy, communicator: Communicator, patterns: Collection[Hosts], *, codec: AnyCodec
) -> bool:
    """Do all groups of replicas come to the same bits of the same gradients, with ``codec`` and not by hosts?

    They lie on hosts like ``patterns``; ``communicator`` is that of one.  Encoded values that owners decode are added
    in the order of ranks.  What is reduced by all-reduce is added in the same order by the same messages, which a
    cost model, pins and shared memory do not promise.
    """
    if not isinstance(codec, Identity | RoundCodec) and not codec.is_summable:
        return True
    if strategy in (CommunicationStrategy.RING_ALL_REDUCE, CommunicationStrategy.TREE_ALL_REDUCE):
        return True
    if strategy is CommunicationStrategy.ADAPTIVE or algorithm_of(strategy, communicator) is None:
        return False
    is_spread = all(len(host) == 1 for pattern in patterns for host in pattern)
    return is_spread or (len(patterns) == 1 and not communicator.may_share_memory)
