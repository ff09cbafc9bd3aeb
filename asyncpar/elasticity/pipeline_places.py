"""Place the stages of a pipeline on the ranks of a world of any size.  Pure.

A world has as many replicas of the pipeline as fit; each has consecutive ranks, one per stage if there are enough,
otherwise each with consecutive stages.  Ranks that are left over are spare.  The changes of a replica's rank are made
alike by its peers in the other replicas; if there is only one replica, another rank mirrors it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpar.elasticity.placement import PartPlacement, mirror_of
from asyncpar.elasticity.portions import Portions


@dataclass(frozen=True)
class PipelinePlaces:
    """``stages`` over ``size`` ranks, which share ``portions``."""

    stages: int
    portions: int
    size: int

    @property
    def width(self) -> int:
        """The number of ranks of one replica."""
        return min(self.stages, self.size)

    @property
    def replicas(self) -> int:
        return min(self.size // self.width, self.portions)

    def replica_of(self, rank: int) -> int | None:
        """Return the replica of ``rank``, None if it is spare."""
        replica = rank // self.width
        return replica if replica < self.replicas else None

    def stages_of(self, rank: int) -> range:
        """Return the stages that ``rank`` runs."""
        if self.replica_of(rank) is None:
            return range(0)
        return Portions(self.stages, self.width).of(rank % self.width)

    def portions_of(self, rank: int) -> range:
        """Return the portions that go through ``rank``."""
        replica = self.replica_of(rank)
        return range(0) if replica is None else Portions(self.portions, self.replicas).of(replica)

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the replica of ``rank``, in the order of their stages."""
        first = rank // self.width * self.width
        return tuple(range(first, first + self.width))

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that run the same stages as ``rank``, by replica."""
        return tuple(rank % self.width + replica * self.width for replica in range(self.replicas))

    def placement(self, hosts: Sequence[Sequence[int]]) -> PartPlacement:
        """Return the placement of the part of each stage."""
        owners = tuple(Portions(self.stages, self.width).owner(stage) for stage in range(self.stages))
        if self.replicas > 1:
            return PartPlacement(owners, (None,) * self.stages, tuple(self.peers_of(owner)[1:] for owner in owners))
        return PartPlacement(owners, tuple(mirror_of(owner, hosts) for owner in owners))


def by_stage(stages: int, portions: int, hosts: Sequence[Sequence[int]]) -> PartPlacement:
    """Return the placement of one part for each of ``stages``."""
    return PipelinePlaces(stages, portions, sum(len(ranks) for ranks in hosts)).placement(hosts)
