"""Placement of the actors of an elastic job: the rank that runs each actor in a world, and its snapshot mirrors.  Pure.

Theory of operation.  Before a world is used, each rank announces what it holds: actors that live in its memory, and
snapshots of others.  All ranks then compute the same placement from all announcements.  An actor stays where it lives.
One that no longer lives anywhere goes to the rank that is first in the order of its name, and goes on from the newest
snapshot.  That order is by highest random weight (Thaler and Ravishankar, 1998): it depends on the actor's name and on
each rank's own identity, so a change of the world moves no actor that need not move.  Snapshots go to the next ranks in
that order, on other hosts if there are some: so a rank that holds the snapshot is often the one that goes on with it.

Actors of one ``spread`` are on different ranks.  Those for which no rank is left are *holes*, until one joins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredActor:
    """An actor that the job declares.  ``spread`` names actors that must be on different ranks; empty: any rank.

    ``mirrors`` is the number of other ranks that keep its snapshot.
    """

    name: str
    class_path: str
    spread: str = ""
    mirrors: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldActor:
    """One rank's share of an actor: the ``version`` of its snapshot there (0: none).

    ``lives_since`` is the generation in which the actor began to live in this rank's memory; -1: it does not.
    """

    name: str
    version: int = 0
    lives_since: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActors:
    """The announcement of one rank.  ``identity`` is the process's own, and is never reused."""

    identity: str
    held: tuple[HeldActor, ...] = ()

    def find(self, name: str) -> HeldActor | None:
        """Return the rank's share of the actor ``name``."""
        return next((held for held in self.held if held.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorPlacement:
    """The place of one actor in a world.

    ``rank`` runs it; None: it is a hole.  ``is_live``: it lives there already.  Otherwise it goes on from the snapshot
    ``version`` of rank ``source``, or begins anew if that is None.  ``mirrors`` are the further ranks that keep its
    snapshots; ``keeper`` is the rank that sends them the newest one.  ``has_given_up``: it failed too often, and is
    nowhere.
    """

    name: str
    rank: int | None
    is_live: bool = False
    version: int = 0
    source: int | None = None
    mirrors: tuple[int, ...] = ()
    has_given_up: bool = False

    @property
    def keeper(self) -> int | None:
        return self.rank if self.is_live else self.source


def place_actors(
    declared: Sequence[DeclaredActor], ranks: Sequence[RankActors], hosts: Sequence[Sequence[int]]
) -> dict[str, ActorPlacement]:
    """Return the place of each actor, by name.  ``ranks`` is by rank; ``hosts`` are the ranks of each host."""
    host_of = {rank: index for index, members in enumerate(hosts) for rank in members}
    living = {actor.name: _where_it_lives(actor.name, ranks) for actor in declared}
    taken = _taken_ranks(declared, living)
    found: dict[str, ActorPlacement] = {}
    for actor in declared:
        order = order_of_ranks(actor.name, [each.identity for each in ranks])
        source, version = _newest_snapshot(actor.name, ranks)
        rank = living[actor.name]
        is_live = rank is not None
        if rank is None:
            used = taken.get(actor.spread, set()) if actor.spread else set()
            rank = _choose(order, used, source if version else None)
            if rank is not None and actor.spread:
                taken.setdefault(actor.spread, set()).add(rank)
        kept_by = rank if rank is not None else source
        found[actor.name] = ActorPlacement(
            name=actor.name,
            rank=rank,
            is_live=is_live,
            version=version,
            source=source,
            mirrors=() if kept_by is None else _mirrors(order, kept_by, host_of, actor.mirrors),
        )
    return found


def order_of_ranks(name: str, identities: Sequence[str]) -> list[int]:
    """Return all ranks, those with the highest weight for the actor ``name`` first."""

    def weight(rank: int) -> bytes:
        return hashlib.blake2b(f"{name}\0{identities[rank]}".encode(), digest_size=16).digest()

    return sorted(range(len(identities)), key=weight, reverse=True)


def _where_it_lives(name: str, ranks: Sequence[RankActors]) -> int | None:
    """Return the rank where the actor lives; of several, which have not shared a world since, the latest one."""
    since = {
        rank: held.lives_since
        for rank, each in enumerate(ranks)
        if (held := each.find(name)) is not None and held.lives_since >= 0
    }
    return max(since, key=lambda rank: (since[rank], -rank), default=None)


def _taken_ranks(declared: Iterable[DeclaredActor], living: Mapping[str, int | None]) -> dict[str, set[int]]:
    taken: dict[str, set[int]] = {}
    for actor in declared:
        rank = living[actor.name]
        if actor.spread and rank is not None:
            taken.setdefault(actor.spread, set()).add(rank)
    return taken


def _newest_snapshot(name: str, ranks: Sequence[RankActors]) -> tuple[int | None, int]:
    versions = {rank: held.version for rank, each in enumerate(ranks) if (held := each.find(name)) and held.version}
    if not versions:
        return None, 0
    rank = max(versions, key=lambda rank: (versions[rank], -rank))
    return rank, versions[rank]


def _choose(order: Sequence[int], used: set[int], holder: int | None) -> int | None:
    """Return the rank for an actor that lives nowhere: that of its snapshot, if it may be there, else the first."""
    if holder is not None and holder not in used:
        return holder
    return next((rank for rank in order if rank not in used), None)


def _mirrors(order: Sequence[int], rank: int, host_of: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Return the ranks that mirror ``rank``: first on as many hosts as there are, then on hosts with one already."""
    others = [other for other in order if other != rank]
    used, first, rest = {host_of.get(rank)}, list[int](), list[int]()
    for other in others:
        (rest if host_of.get(other) in used else first).append(other)
        used.add(host_of.get(other))
    elsewhere = [other for other in rest if host_of.get(other) != host_of.get(rank)]
    here = [other for other in rest if host_of.get(other) == host_of.get(rank)]
    return tuple([*first, *elsewhere, *here][:count])
