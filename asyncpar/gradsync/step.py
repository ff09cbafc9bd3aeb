"""One step: which gradients are final, the agreement of ranks, the runs of all buckets, and the ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from asyncpar.agreement.owed import OwedCollective
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync.agreement import Agreement
from asyncpar.gradsync.bucket_run import BucketFlow
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import Keys, Name
from asyncpar.gradsync.outcome import Findings, StepOutcome, collect
from asyncpar.gradsync.plan import BucketPlan
from asyncpar.gradsync.statistics import StepRecord


class SyncStep:
    """What ``GradientSynchronizer.step`` yields.  Call ``ready`` as gradients become final, from any thread."""

    def __init__(self, plan: BucketPlan, *, overlap: bool) -> None:
        self.record = StepRecord()
        self.outcome = StepOutcome()
        self.observed: list[str] = []
        """Names in the order in which they were reported."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._known = {spec.name for spec in plan.specs}
        self._unreported = set(self._known)
        self._bucket_of = {slot.name: bucket.index for bucket in plan.buckets for slot in bucket.slots}
        self._missing = [len(bucket.slots) for bucket in plan.buckets]
        self._complete = [asyncio.Event() for _ in plan.buckets]
        self._in_turn = [bucket.index for bucket in sorted(plan.buckets, key=lambda bucket: bucket.turn)]
        self._overlap = overlap
        self._turns = asyncio.Semaphore(len(plan.buckets) if overlap else 1)
        self._is_over = False

    def ready(self, name: str) -> None:
        """Say that the gradient of ``name`` will not change any more in this step.

        Its bucket starts when all of its gradients are final.  Callable from any thread; once per name and step, else
        ``UsageError``.  After a step has failed, calls have no effect: a worker thread need not know.
        """
        with self._lock:
            if name not in self._known:
                raise UsageError(f"name: expected a parameter of this step, got {name!r}")
            if self._is_over:
                return
            if name not in self._unreported:
                raise UsageError(f"name: the gradient of {name!r} was already reported, or the step's block was left")
            self._unreported.remove(name)
            self.observed.append(name)
            index = self._bucket_of.get(name)
            if index is None:  # a gradient without values is in no bucket
                return
            self._missing[index] -= 1
            if self._missing[index] == 0 and self._overlap:
                self._loop.call_soon_threadsafe(self._complete[index].set)

    def finish(self) -> None:
        """Take every gradient as final: the caller's block is done.  On the loop's thread."""
        with self._lock:
            self._unreported.clear()
        self.record.last_gradient_at = self._loop.time()
        for index in self._in_turn:
            self._complete[index].set()

    def close(self) -> None:
        """Ignore whatever a worker thread may still report."""
        with self._lock:
            self._is_over = True

    async def carry(self, flow: BucketFlow) -> None:
        """Run ``flow`` when its bucket is complete; without overlap, when its turn has come."""
        await self._complete[flow.scheme.bucket.index].wait()
        async with self._turns:
            start = self._loop.time()
            await flow.run()
            self.record.intervals.append((start, self._loop.time()))


_FINE, _LOST, _GIVEN_UP = 0, 1, 2


class StepRun:
    """One step on this rank.

    Flows exchange nothing before ``agreed`` is set, which is when ``agreement`` is reached.  With ``observes`` the
    ranks take over the order in which gradients became final on the first replica.
    """

    def __init__(
        self,
        agreement: Agreement,
        flows: Sequence[BucketFlow],
        groups: SyncGroups,
        *,
        keys: Keys,
        agreed: asyncio.Event,
        observes: bool,
    ) -> None:
        self.flows = flows
        self.order: list[str] | None = None
        self._agreement = agreement
        self._keys = keys
        self._agreed = agreed
        self._observed: list[str] = []
        self._findings = Findings({}, [])
        everyone, replicas = groups.everyone, groups.replicas
        self._ending = Ending(everyone, key=keys.ending, rare=keys.rare)
        self._all_findings = OwedCollective(
            lambda: everyone.all_gather_object(self._findings, key=f"{keys.rare}/findings", wanted=Findings)
        )
        self._order = OwedCollective(
            lambda: replicas.broadcast_object(self._observed, key=f"{keys.rare}/order", wanted=list[str])
        )
        self._observes = observes and replicas.size > 1

    @property
    def nbytes(self) -> int:
        """Size of all buckets."""
        return sum(flow.scheme.flat.nbytes for flow in self.flows)

    def begin(self, step: SyncStep, tasks: asyncio.TaskGroup) -> None:
        """Start everything that need not wait for the end of the step's block."""
        tasks.create_task(self._agree(), name="gradients/agreement")
        for flow in sorted(self.flows, key=lambda flow: flow.scheme.bucket.turn):
            tasks.create_task(step.carry(flow), name=flow.name)

    async def end(self, step: SyncStep) -> StepOutcome:
        """Return what became of the step, on all ranks of all groups, after all flows have run."""
        self._findings = collect(flow.outcome for flow in self.flows)
        findings = [self._findings]
        if await self._ending.run(has_lost=bool(self._findings.lost)):
            findings = await self._all_findings.run()
        outcome = step.outcome
        outcome.add(findings)
        if self._observes:
            self._observed = step.observed
            self.order = await self._order.run()
        return outcome

    async def give_up(self, reason: str) -> None:
        """Tell all ranks that wait, or will wait, for this one, that it fails for ``reason``.  Waits for nobody."""
        await self._ending.give_up(reason)
        for obligation in list(self._obligations()):
            await obligation.begin_and_cancel()
        for flow in self.flows:
            await flow.give_up()

    async def _agree(self) -> None:
        self._keys.adopt(await self._agreement.run())
        self._agreed.set()

    def _obligations(self) -> Iterator[OwedCollective[Any]]:
        yield from self._agreement.obligations
        yield self._all_findings
        if self._observes:
            yield self._order


class Ending:
    """The last exchange of a step, over all ranks: nobody writes gradients before everybody can.

    A rank that gives up says so, because others may have all that they need from it; they ask it why by a name that
    begins with ``rare``, and hear it also if it aborts that.
    """

    def __init__(self, everyone: Communicator, *, key: Name, rare: str) -> None:
        self._everyone = everyone
        self._flag = np.zeros(1, np.uint8)
        self._exchange = OwedCollective(lambda: everyone.all_gather(self._flag, key=str(key)))
        self._reason = ""
        self._why = OwedCollective(lambda: everyone.all_gather_object(self._reason, key=f"{rare}/why", wanted=str))

    async def run(self, *, has_lost: bool) -> bool:
        """Return whether some rank ``has_lost`` the mean of a bucket.  Raises ``PeerCancelled`` if one gave up."""
        self._flag[0] = _LOST if has_lost else _FINE
        if self._everyone.size == 1:
            return has_lost
        flags = (await self._exchange.run()).reshape(-1).tolist()
        if _GIVEN_UP in flags:
            rank = self._everyone.ranks[flags.index(_GIVEN_UP)]
            text = next(filter(None, await self._why.run()), "it was cancelled")
            raise PeerCancelled(f"rank {rank} gave up the step: {text}", rank=rank, cause=text)
        return _LOST in flags

    async def give_up(self, reason: str) -> None:
        """Tell the others, unless they know how this rank is.  Waits for nobody."""
        self._reason = reason
        if self._everyone.size > 1:
            self._flag[0] = _GIVEN_UP
            await self._exchange.begin_and_cancel()
            await self._why.begin_and_cancel()


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the cause out of a task group's exceptions: that of this rank rather than a peer's cancelling."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = sorted(group.exceptions, key=lambda error: isinstance(error, PeerCancelled))
        raise errors[0] from errors[0].__cause__
