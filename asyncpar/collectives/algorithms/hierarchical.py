"""Hierarchical all-reduce: up inside each host, across between hosts, and down again inside.

The buffer has a *part* for each *leader* of a host, and every host has as many leaders: as many as the smallest host
has ranks.  Going up, the ranks of a host combine each part at its leader; across, the leaders of a part on all hosts
reduce it among themselves; going down, leaders send their parts to all ranks of their host.  So a host sends only ``2
(hosts - 1) / hosts`` of the buffer to others, spread over its leaders, and where hosts are equally large all ranks take
part.  Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize collective operation
performance", IPDPS 2000; parts by local rank as in Jia et al., "Highly scalable deep learning training system with
mixed-precision", arXiv:1807.11205.

Up and down need not use messages: messages between hosts are the same whatever happens inside a host.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.collectives.algorithms import cyclic, rooted
from asyncpar.collectives.algorithms.steps import Recv, Round, Send, Spans, Step, relabelled, span

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of a group by host; each rank occurs once."""


def leaders_by_ring(hosts: Hosts) -> int:
    """Return the number of leaders per host, which communicate with other hosts: the number of parts of the buffer."""
    return min(map(len, hosts))


def chunks_by_ring(hosts: Hosts) -> int:
    """Return the number of chunks of the buffer: each part has one per host."""
    return leaders_by_ring(hosts) * len(hosts)


def all_reduce_by_ring(rank: int, hosts: Hosts) -> Iterator[Round]:
    """Reduce each part across in a ring of hosts."""
    members, place = _members(rank, hosts)
    parts, width = leaders_by_ring(hosts), len(hosts)
    yield from _up(place, members, parts, width)
    yield from across_by_ring(rank, hosts)
    yield from _down(place, members, parts, width)


def across_by_ring(rank: int, hosts: Hosts) -> Iterator[Round]:
    """Yield the rounds of ``all_reduce_by_ring`` between hosts."""
    members, place = _members(rank, hosts)
    if place >= leaders_by_ring(hosts):
        return
    peers = tuple(others[place] for others in hosts)
    first = place * len(hosts)
    yield from relabelled(cyclic.ring_all_reduce(hosts.index(members), len(hosts)), ranks=peers, offset=first)


def all_reduce_by_tree(rank: int, hosts: Hosts) -> Iterator[Round]:
    """Reduce across in a tree of the hosts' first ranks; one part, one chunk."""
    members, place = _members(rank, hosts)
    yield from _up(place, members, 1, 1)
    yield from across_by_tree(rank, hosts)
    yield from _down(place, members, 1, 1)


def across_by_tree(rank: int, hosts: Hosts) -> Iterator[Round]:
    """Yield the rounds of ``all_reduce_by_tree`` between hosts."""
    members, place = _members(rank, hosts)
    if place == 0:
        yield from relabelled(rooted.tree_all_reduce(hosts.index(members), len(hosts)), ranks=_leaders(hosts))


def _up(place: int, members: tuple[int, ...], parts: int, width: int) -> Iterator[Round]:
    """Combine each part, ``width`` chunks, at its leader: in a tree if there is one part, else in pairs."""
    if parts == 1:
        yield from relabelled(rooted.tree_reduce(place, len(members), 0), ranks=members, scale=width)
        return
    for to, source in _pairs(place, len(members)):
        steps: list[Step] = []
        if to < parts:
            steps.append(Send(members[to], _part(to, width)))
        if place < parts:
            steps.append(Recv(members[source], _part(place, width), reduce=True))
        yield tuple(steps)


def _down(place: int, members: tuple[int, ...], parts: int, width: int) -> Iterator[Round]:
    """Send each part from its leader to all ranks of the host."""
    if parts == 1:
        yield from relabelled(rooted.tree_broadcast(place, len(members), 0), ranks=members, scale=width)
        return
    for to, source in _pairs(place, len(members)):
        steps: list[Step] = []
        if place < parts:
            steps.append(Send(members[to], _part(place, width)))
        if source < parts:
            steps.append(Recv(members[source], _part(source, width)))
        yield tuple(steps)


def _pairs(place: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the destination and the source of each step, such that every rank is paired with every other."""
    for distance in range(1, size):
        yield (place + distance) % size, (place - distance) % size


def _part(part: int, width: int) -> Spans:
    return span(part * width, (part + 1) * width)


def _members(rank: int, hosts: Hosts) -> tuple[tuple[int, ...], int]:
    """Return the ranks of the host of ``rank``, and its index among them."""
    members = next(members for members in hosts if rank in members)
    return members, members.index(rank)


def _leaders(hosts: Hosts) -> tuple[int, ...]:
    return tuple(members[0] for members in hosts)
