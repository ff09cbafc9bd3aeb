"""Place the parts of a sharded state: their owners, their mirrors, and the moves when the world changes.  Pure.

Theory of operation.  A state that is too large for one rank, or belongs to a portion, is cut into a fixed number of
*parts*, whatever the world.  Each part has an *owner*, which changes it, and a *mirror*, another rank that gets every
change before the step is committed: so one rank may be lost at any moment, and the next world finds each part with a
survivor.  The mirror is on another host if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from asyncpar.elasticity.portions import Portions

Holders = Sequence[frozenset[int]]
"""By rank, the parts that it has."""


def mirror_of(rank: int, hosts: Sequence[Sequence[int]]) -> int | None:
    """Return the rank that mirrors ``rank``: in its place on the next host; on the only host the next one.

    ``hosts`` are the ranks by host.  None in a world of one.
    """
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    ranks, place = hosts[host], hosts[host].index(rank)
    if len(hosts) > 1:
        following = hosts[(host + 1) % len(hosts)]
        return following[place % len(following)]
    return ranks[(place + 1) % len(ranks)] if len(ranks) > 1 else None


@dataclass(frozen=True)
class PartPlacement:
    """By part: the rank that owns it, and the rank that mirrors it, None if no rank does.

    ``replicas``, if any, are ranks that change the part just as its owner does, and so need no mirror.
    """

    owners: tuple[int, ...]
    mirrors: tuple[int | None, ...]
    replicas: tuple[tuple[int, ...], ...] = ()

    def holders(self, part: int) -> tuple[int, ...]:
        """Return the ranks that are to have ``part``, its owner first."""
        mirror, replicas = self.mirrors[part], self.replicas[part] if self.replicas else ()
        return (self.owners[part], *(() if mirror is None else (mirror,)), *replicas)

    @cached_property
    def _held(self) -> dict[int, frozenset[int]]:
        held: dict[int, set[int]] = {}
        for part in range(len(self.owners)):
            for rank in self.holders(part):
                held.setdefault(rank, set()).add(part)
        return {rank: frozenset(parts) for rank, parts in held.items()}

    def held(self, rank: int) -> frozenset[int]:
        """Return the parts that ``rank`` owns or mirrors."""
        return self._held.get(rank, frozenset())

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the parts of ``rank``, in order."""
        return tuple(part for part, owner in enumerate(self.owners) if owner == rank)

    def changed(self, rank: int) -> tuple[int, ...]:
        """Return the parts that ``rank`` changes, as their owner or as one of its replicas, in order."""
        replicas = enumerate(self.replicas)
        return tuple(sorted({*self.owned(rank), *(part for part, ranks in replicas if rank in ranks)}))

    def mirrored(self, rank: int) -> tuple[int, ...]:
        """Return the parts that ``rank`` mirrors, in order."""
        return tuple(part for part, mirror in enumerate(self.mirrors) if mirror == rank)


def by_portion(count: int, hosts: Sequence[Sequence[int]]) -> PartPlacement:
    """Return the placement of one part for each of ``count`` portions: with the rank that has the portion."""
    portions = Portions(count, sum(len(ranks) for ranks in hosts))
    owners = tuple(portions.owner(portion) for portion in range(count))
    mirrors = {owner: mirror_of(owner, hosts) for owner in set(owners)}
    return PartPlacement(owners, tuple(mirrors[owner] for owner in owners))


@dataclass(frozen=True, slots=True)
class PartMove:
    """``part`` goes from rank ``source``, which has it, to rank ``dest``."""

    part: int
    source: int
    dest: int


def plan_moves(holders: Holders, placement: PartPlacement) -> tuple[tuple[PartMove, ...], tuple[int, ...]]:
    """Return the moves after which every rank has its parts, and the parts that no rank has any more.

    Of several ranks that have a part, the one that sends least so far sends it.
    """
    sent = [0] * len(holders)
    moves: list[PartMove] = []
    lost: list[int] = []
    for part in range(len(placement.owners)):
        sources = [rank for rank, parts in enumerate(holders) if part in parts]
        if not sources:
            lost.append(part)
            continue
        for dest in placement.holders(part):
            if dest not in sources:
                source = min(sources, key=lambda rank: (sent[rank], rank))
                sent[source] += 1
                moves.append(PartMove(part, source, dest))
    return tuple(moves), tuple(lost)
