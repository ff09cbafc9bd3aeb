"""Groups made of groups."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.arrays import check_rank
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.gathers import exchange_numbers
from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Limits, Operation
from asyncpar.collectives.protocol import describe
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

    Nothing is sent: members find the group's number from the ranks and from ``key``, which may be used once with the
    same ranks, or from how often they have asked for them.
    """
    chosen = _checked_ranks(ranks, engine.size)
    world_ranks = tuple(engine.ranks[rank] for rank in chosen)
    if engine.rank not in chosen:
        return None
    limits = Limits(engine.group.limits.timeout) if has_own_timeout else engine.group.limits
    return _made(engine, world_ranks, engine.subgroup_number(world_ranks, key), name, limits)


def split(
    engine: Engine, color: object, key: object, name: str | None, wrap: Callable[[Engine], T]
) -> Coroutine[Any, Any, T | None]:
    """Make one group of the ranks that pass equal colors, ordered by key and then by rank; None for color None."""
    if color is not None and (isinstance(color, bool) or not isinstance(color, int | np.integer)):
        raise UsageError(f"color: expected an integer or None, got {color!r}")
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise UsageError(f"key: expected an integer, got {key!r}")
    mine = [0, 0, int(key)] if color is None else [1, int(color), int(key)]
    for name_of, value in (("color", mine[1]), ("key", mine[2])):
        if not -(2**63) <= value < 2**63:
            raise UsageError(f"{name_of}: expected an integer of at most 64 bits, got {value}")

    async def body(operation: Operation) -> T | None:
        rows = (await exchange_numbers(engine, operation, mine)).tolist()
        if color is None:
            return None
        members = sorted((row[2], rank) for rank, row in enumerate(rows) if row[:2] == mine[:2])
        world_ranks = tuple(engine.ranks[rank] for _, rank in members)
        number = hash64("split", engine.group.number, operation.sequence, mine[1])
        return wrap(_made(engine, world_ranks, number, name, Limits(engine.group.limits.timeout)))

    return engine.start("split", describe("split", (), "bruck"), None, body)


def hosts_of(groups: Hosts, ranks: tuple[int, ...]) -> Hosts:
    """Return the places in ``ranks`` by host, where ``groups`` has the same ranks and more by host."""
    place = {rank: index for index, rank in enumerate(ranks)}
    hosts = (tuple(sorted(place[rank] for rank in group if rank in place)) for group in groups)
    return tuple(sorted(host for host in hosts if host))


def _made(engine: Engine, world_ranks: tuple[int, ...], number: int, name: str | None, limits: Limits) -> Engine:
    model = engine.policy.model
    hosts = hosts_of(engine.table.links.world.hosts, world_ranks)
    policy = replace(engine.policy, model=replace(model, size=len(world_ranks), hosts=hosts))
    return Engine(
        table=engine.table,
        number=number,
        name=name or _named(world_ranks),
        ranks=world_ranks,
        policy=policy,
        limits=limits,
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
