"""The way of one bucket through its phases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import phases
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import BucketKeys
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.outcome import BucketOutcome
from asyncpar.gradsync.phases import Packing
from asyncpar.gradsync.schemes import Leg, Place, Scheme
from asyncpar.gradsync.walk import ThreadTurns, Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """What the flows of a step share.

    Nothing is exchanged before ``agreed`` is set.  ``step`` is the number of the step, part of the keys that are used
    only when something is not finite.
    """

    groups: SyncGroups
    packing: Packing
    policy: NonFinitePolicy
    turns: ThreadTurns
    agreed: asyncio.Event
    step: int


class BucketFlow:
    """One bucket in one step.  Gradients are read and not written.

    When a mean is not finite, which all replicas find alike, they tell each other who brought what.
    """

    def __init__(self, scheme: Scheme, *, keys: BucketKeys, place: Place, settings: FlowSettings) -> None:
        self.scheme = scheme
        self.name = str(keys.replicas)
        self._settings = settings
        self._walk = Walk(scheme=scheme, turns=settings.turns, agreed=settings.agreed)
        self._is_over = False
        self._legs = self._make_legs(keys, place)
        rare = keys.replicas / f"step/{settings.step}"
        replicas: Communicator = settings.groups.replicas
        self._own: list[str] = []
        self._report = Obligation(lambda: replicas.all_gather_object(self._own, key=f"{rare}/finite", wanted=list[str]))
        drops = settings.policy is NonFinitePolicy.DROP and replicas.size > 1
        self._again = list(scheme.legs(rare / "again", place)) if drops else []
        self.outcome = BucketOutcome(contributors=replicas.size)

    async def run(self) -> None:
        """Reduce the bucket over all ranks.

        Afterwards ``scheme.result`` holds what became of it, unless ``outcome`` says that it cannot be had.
        """
        await self._walk.take(self._legs, before=self._pack)
        if not self.scheme.is_finite:
            await self._explain()
        self._is_over = True

    @property
    def obligations(self) -> Iterator[Obligation[Any]]:
        """What this rank owes the others, as far as it can know."""
        yield from (leg.exchange for leg in self._legs)
        if not self._is_over:
            yield self._report
            yield from (leg.exchange for leg in self._again)

    async def give_up(self) -> None:
        """Tell ranks that wait, or will wait, for this bucket that it will not come.  Waits for nobody."""
        self.scheme.spoil()
        for obligation in list(self.obligations):
            await obligation.give_up()

    def _make_legs(self, keys: BucketKeys, place: Place) -> list[Leg]:
        """Return the legs of all phases, but for the packing before the first."""
        scheme, groups = self.scheme, self._settings.groups
        earlier = [
            phases.tensor_parallel_phase(scheme, groups, keys.slices),
            phases.pipeline_phase(scheme, groups, keys.ends),
        ]
        before = [Leg(None, exchange) for exchange in earlier if exchange is not None]
        return [*before, *phases.data_parallel_phase(scheme, keys.replicas, place)]

    def _pack(self) -> None:
        phases.pack(self.scheme, self._settings.packing)

    async def _explain(self) -> None:
        """Find out whose values are not finite; go on without them if that is wanted."""
        await self._walk.work([self._find_own], is_first=False)
        every = await self._report.run()
        ranks = self._settings.groups.replicas.ranks
        culprits = {rank: tuple(names) for rank, names in zip(ranks, every, strict=True) if names}
        contributors = len(every) - len(culprits)
        if self._again and culprits and contributors:
            await self._walk.take(self._again, before=self._pack_zeros if self._own else self._pack)
            if self.scheme.is_finite:
                self.outcome = BucketOutcome(culprits=culprits, contributors=contributors)
                return
        self.outcome = BucketOutcome(culprits=culprits, contributors=len(every), lost=str(self.scheme.bucket))

    def _find_own(self) -> None:
        self._pack()
        self._own = phases.find_non_finite(self.scheme.bucket, self.scheme.payload)

    def _pack_zeros(self) -> None:
        self.scheme.payload.fill(0.0)
