"""Run one bucket through its phases: work in threads that take turns, collectives on the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncpar.agreement.owed import OwedCollective
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.offload import INLINE_BYTES, off_loop
from asyncpar.gradsync import phases
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import BucketKeys
from asyncpar.gradsync.outcome import BucketOutcome
from asyncpar.gradsync.phases import Packing
from asyncpar.gradsync.schemes import Place, ReductionStep, Scheme


class ThreadTurns:
    """Who may use a thread: ``sending`` work comes before a bucket's first message, ``receiving`` work after it.

    Of each kind a few run at a time, in the order in which they asked.  Buckets that are ready together would otherwise
    all be encoded together, and the wire would be idle until the first of them is done, which is almost when the last
    one is.
    """

    def __init__(self, *, threads: int) -> None:
        self.sending = asyncio.Semaphore(threads)
        self.receiving = asyncio.Semaphore(threads)


@dataclass(slots=True, kw_only=True)
class RunTimes:
    """Seconds of one run: of work before the first message and after it, without the wait for a thread, and of
    collectives."""

    sending: float = 0.0
    receiving: float = 0.0
    exchanging: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRun:
    """One run of the steps of ``scheme``.  No collective begins before ``agreed`` is set."""

    scheme: Scheme
    turns: ThreadTurns
    agreed: asyncio.Event
    times: RunTimes = field(default_factory=RunTimes)

    async def take(
        self, steps: Sequence[ReductionStep], *, before: Callable[[], None], after: Callable[[], None] | None = None
    ) -> None:
        """Take ``steps`` and settle the scheme behind the last.

        ``before`` is done in one go with the work of the first, ``after`` with the settling.
        """
        works: list[Callable[[], None]] = [before]
        is_first = True
        for step in steps:
            works += [] if step.work is None else [step.work]
            await self.work(works, is_first=is_first)
            await self.agreed.wait()
            begun = time.perf_counter()
            await step.exchange.run()
            self.times.exchanging += time.perf_counter() - begun
            works, is_first = [], False
        await self.work([*works, self.scheme.settle, *([] if after is None else [after])], is_first=is_first)

    async def work(self, works: Sequence[Callable[[], None]], *, is_first: bool) -> None:
        """Do ``works``, in a thread when its turn has come, if they would hold up the loop."""
        nbytes = self.scheme.flat.nbytes
        if not works:
            return
        work = partial(self._do, works, is_first=is_first)
        if nbytes <= INLINE_BYTES:
            work()
            return
        async with self.turns.sending if is_first else self.turns.receiving:
            await off_loop(work, nbytes=nbytes)

    def _do(self, works: Sequence[Callable[[], None]], *, is_first: bool) -> None:
        begun = time.perf_counter()
        for work in works:
            work()
        seconds = time.perf_counter() - begun
        if is_first:
            self.times.sending += seconds
        else:
            self.times.receiving += seconds


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
        self._run = BucketRun(scheme=scheme, turns=settings.turns, agreed=settings.agreed)
        self._is_over = False
        self._steps = self._make_steps(keys, place)
        rare = keys.replicas / f"step/{settings.step}"
        replicas: Communicator = settings.groups.replicas
        self._own: list[str] = []
        self._report = OwedCollective(
            lambda: replicas.all_gather_object(self._own, key=f"{rare}/finite", wanted=list[str])
        )
        drops = settings.policy is NonFinitePolicy.DROP and replicas.size > 1
        self._again = list(scheme.reduction_steps(rare / "again", place)) if drops else []
        self.outcome = BucketOutcome(contributors=replicas.size)

    async def run(self) -> None:
        """Reduce the bucket over all ranks.

        Afterwards ``scheme.result`` holds what became of it, unless ``outcome`` says that it cannot be had.
        """
        await self._run.take(self._steps, before=self._pack)
        if not self.scheme.is_finite:
            await self._explain()
        self._is_over = True

    @property
    def obligations(self) -> Iterator[OwedCollective[Any]]:
        """What this rank owes the others, as far as it can know."""
        yield from (step.exchange for step in self._steps)
        if not self._is_over:
            yield self._report
            yield from (step.exchange for step in self._again)

    async def give_up(self) -> None:
        """Tell ranks that wait, or will wait, for this bucket that it will not come.  Waits for nobody."""
        self.scheme.poison()
        for obligation in list(self.obligations):
            await obligation.begin_and_cancel()

    def _make_steps(self, keys: BucketKeys, place: Place) -> list[ReductionStep]:
        """Return the steps of all phases, but for the packing before the first."""
        scheme, groups = self.scheme, self._settings.groups
        earlier = [
            phases.tensor_parallel_phase(scheme, groups, keys.tp),
            phases.pipeline_phase(scheme, groups, keys.embedding),
        ]
        before = [ReductionStep(None, exchange) for exchange in earlier if exchange is not None]
        return [*before, *phases.data_parallel_phase(scheme, keys.replicas, place)]

    def _pack(self) -> None:
        phases.pack(self.scheme, self._settings.packing)

    async def _explain(self) -> None:
        """Find out whose values are not finite; go on without them if that is wanted."""
        await self._run.work([self._find_own], is_first=False)
        every = await self._report.run()
        ranks = self._settings.groups.replicas.ranks
        culprits = {rank: tuple(names) for rank, names in zip(ranks, every, strict=True) if names}
        contributors = len(every) - len(culprits)
        if self._again and culprits and contributors:
            await self._run.take(self._again, before=self._pack_zeros if self._own else self._pack)
            if self.scheme.is_finite:
                self.outcome = BucketOutcome(culprits=culprits, contributors=contributors)
                return
        self.outcome = BucketOutcome(culprits=culprits, contributors=len(every), lost=str(self.scheme.bucket))

    def _find_own(self) -> None:
        self._pack()
        self._own = phases.find_non_finite(self.scheme.bucket, self.scheme.payload)

    def _pack_zeros(self) -> None:
        self.scheme.payload.fill(0.0)
