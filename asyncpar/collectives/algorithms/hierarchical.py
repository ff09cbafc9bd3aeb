"""Hierarchical all-reduce: inside each host to its first rank, between those, and back.

Only one rank of each host uses the network.  Source: Karonis et al., "Exploiting hierarchy in parallel computer
networks to optimize collective operation performance", IPDPS 2000.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms import ring, tree
from asyncpar.collectives.algorithms.steps import Round, relabelled

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of a group by host; each rank occurs once."""


def all_reduce_by_ring(rank: int, hosts: Hosts) -> Iterator[Round]:
    """Sum in a tree inside each host, in a ring between the hosts' first ranks, hand back; one chunk per host.

    A host's first rank sends ``2 (hosts - 1) / hosts`` of the buffer to other hosts.
    """
    members = _members(rank, hosts)
    place = members.index(rank)
    yield from relabelled(tree.reduce(place, len(members), 0), ranks=members, scale=len(hosts))
    if place == 0:
        yield from relabelled(ring.all_reduce(hosts.index(members), len(hosts)), ranks=_leaders(hosts))
    yield from relabelled(tree.broadcast(place, len(members), 0), ranks=members, scale=len(hosts))


def all_reduce_by_tree(rank: int, hosts: Hosts) -> Iterator[Round]:
    """Sum in a tree inside each host and in a tree between the hosts' first ranks, hand back; one chunk."""
    members = _members(rank, hosts)
    place = members.index(rank)
    yield from relabelled(tree.reduce(place, len(members), 0), ranks=members)
    if place == 0:
        yield from relabelled(tree.all_reduce(hosts.index(members), len(hosts)), ranks=_leaders(hosts))
    yield from relabelled(tree.broadcast(place, len(members), 0), ranks=members)


def _members(rank: int, hosts: Hosts) -> tuple[int, ...]:
    return next(members for members in hosts if rank in members)


def _leaders(hosts: Hosts) -> tuple[int, ...]:
    return tuple(members[0] for members in hosts)
