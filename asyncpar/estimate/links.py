"""At which rate the groups of a layout send.  Pure; layouts that differ in other things only share what is found."""

from __future__ import annotations

from functools import lru_cache

from asyncpar.config.rank_order import RankOrder
from asyncpar.estimate.machine import Machine

_KEPT = 32


@lru_cache(maxsize=_KEPT)
def ring_bandwidth(machine: Machine, order: RankOrder, axis: str) -> float:
    """Return the bytes/s at which a rank sends when all groups along ``axis`` run rings at once."""
    return machine.rings_bandwidth(_groups(order, axis))


@lru_cache(maxsize=_KEPT)
def pipeline_ring_bandwidth(machine: Machine, order: RankOrder, stages: tuple[int, ...]) -> float:
    """Return the same for rings over ``stages`` of every pipeline."""
    return machine.rings_bandwidth([[ranks[stage] for stage in stages] for ranks in _groups(order, "pp")])


@lru_cache(maxsize=_KEPT)
def hop_bandwidth(machine: Machine, order: RankOrder, hops: frozenset[tuple[int, int]]) -> float:
    """Return the bytes/s between stages when every pipeline makes ``hops``, from one stage to another, at once."""
    return machine.hops_bandwidth((ranks[one], ranks[other]) for ranks in _groups(order, "pp") for one, other in hops)


@lru_cache(maxsize=_KEPT)
def _groups(order: RankOrder, axis: str) -> tuple[tuple[int, ...], ...]:
    return order.groups(axis)
