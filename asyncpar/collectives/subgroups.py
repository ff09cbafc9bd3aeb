"""Groups made from groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.arrays import check_rank
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Limits
from asyncpar.errors import UsageError

T = TypeVar("T")


def subgroup(
    engine: Engine,
    ranks: Iterable[int],
    name: str | None,
    key: str | None = None,
    *,
    has_own_timeout: bool = True,
) -> Engine | None:
    """Return the engine of the group of ``ranks`` (of this group), None if this rank is not one of them.

    Nothing is sent: members derive the group's number from the ranks and from ``key``, which may be used once with the
    same ranks, or from how often they have requested them.
    """
    chosen = _checked_ranks(ranks, engine.size)
    world_ranks = tuple(engine.ranks[rank] for rank in chosen)
    if engine.rank not in chosen:
        return None
    limits = Limits(engine.group.limits.timeout) if has_own_timeout else engine.group.limits
    return make_engine(engine, world_ranks, engine.subgroup_number(world_ranks, key), name, limits)


def survivors(engine: Engine, ranks: tuple[int, ...], number: int) -> Engine:
    """Return the engine of the group of ``ranks`` (of the world), the survivors by agreement ``number``.

    It does not end with the group of ``engine``.
    """
    limits = Limits(engine.group.limits.timeout)
    name = hash64("shrink", engine.group.number, number, ranks)
    return make_engine(engine, ranks, name, None, limits, ends_with_it=False)


def hosts_of(groups: Hosts, ranks: tuple[int, ...]) -> Hosts:
    """Return the indices in ``ranks`` by host, where ``groups`` has the same ranks and more by host."""
    place = {rank: index for index, rank in enumerate(ranks)}
    hosts = (tuple(sorted(place[rank] for rank in group if rank in place)) for group in groups)
    return tuple(sorted(host for host in hosts if host))


def make_engine(
    engine: Engine,
    world_ranks: tuple[int, ...],
    number: int,
    name: str | None,
    limits: Limits,
    *,
    ends_with_it: bool = True,
) -> Engine:
    """Return the engine of a new group; if it ``ends_with_it``, revoking the group of ``engine`` revokes it too."""
    model = engine.policy.model
    hosts = hosts_of(engine.table.links.world.hosts, world_ranks)
    lane = model.local if len(hosts) == 1 < len(model.hosts) else model.lane  # its lanes are those inside a host
    policy = replace(engine.policy, model=replace(model, size=len(world_ranks), hosts=hosts, lane=lane))
    return Engine(
        table=engine.table,
        number=number,
        name=name or _named(world_ranks),
        ranks=world_ranks,
        policy=policy,
        limits=limits,
        ancestors=engine.group.ancestors | {engine.group.number} if ends_with_it else frozenset(),
    )


def _named(ranks: tuple[int, ...]) -> str:
    shown = ",".join(map(str, ranks[:8]))
    return f"of ranks {shown}" + (f",... ({len(ranks)} in all)" if len(ranks) > 8 else "")


def _checked_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    chosen = tuple(ranks)
    for rank in chosen:
        check_rank(rank, size, "ranks")
    if not chosen or len(set(chosen)) != len(chosen):
        raise UsageError(f"ranks: expected at least one rank, each once, got {list(chosen)}")
    return tuple(int(rank) for rank in chosen)
