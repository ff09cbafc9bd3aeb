"""One step: which gradients are final, the comparison of ranks, the runs of all buckets, and the ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import Comparison, Lines, OwedCollective, digest_of
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync.bucket_run import BucketFlow
from asyncpar.gradsync.groups import ALL_RANKS, EMBEDDING, REPLICAS, TENSOR_PARALLEL, Keys, SyncGroups
from asyncpar.gradsync.layout import BucketLayout
from asyncpar.gradsync.plan import BucketPlan
from asyncpar.gradsync.statistics import NonFiniteFindings, StepOutcome, StepRecord, collect


class SyncStep:
    """The step that ``GradientSynchronizer.step`` yields.  Report final gradients by ``ready``, from any thread."""

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
        """Ignore what a worker thread still reports."""
        with self._lock:
            self._is_over = True

    async def carry(self, flow: BucketFlow) -> None:
        """Run ``flow`` when its bucket is complete; without overlap, when its turn has come."""
        await self._complete[flow.scheme.bucket.index].wait()
        async with self._turns:
            start = self._loop.time()
            await flow.run()
            self.record.intervals.append((start, self._loop.time()))


class StepRun:
    """One step on this rank.

    Flows exchange nothing before ``agreed`` is set, after ``comparison``.  With ``observes`` all ranks use from the
    next step on the order in which gradients became final on the first replica.
    """

    def __init__(
        self,
        comparison: Comparison,
        flows: Sequence[BucketFlow],
        groups: SyncGroups,
        *,
        keys: Keys,
        agreed: asyncio.Event,
        observes: bool,
    ) -> None:
        self.flows = flows
        self.order: list[str] | None = None
        self.is_refused = False
        """Do ranks differ?  All of them know, so none has to be told."""
        self._comparison = comparison
        self._keys = keys
        self._agreed = agreed
        self._observed: list[str] = []
        self._findings = NonFiniteFindings({}, [])
        self._has_lost = np.zeros(1, np.uint8)
        self._size = groups.everyone.size
        everyone, replicas = groups.everyone, groups.replicas
        self._ending = OwedCollective(lambda: everyone.all_gather(self._has_lost, key=str(keys.ending)))
        self._all_findings = OwedCollective(
            lambda: everyone.all_gather_object(self._findings, key=f"{keys.rare}/findings", wanted=NonFiniteFindings)
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
        tasks.create_task(self._compare(), name="gradients/agreement")
        for flow in sorted(self.flows, key=lambda flow: flow.scheme.bucket.turn):
            tasks.create_task(step.carry(flow), name=flow.name)

    async def end(self, step: SyncStep) -> StepOutcome:
        """Return the outcome of the step, on all ranks of all groups, after all flows have run.

        No rank writes gradients before this returns, and it raises on all ranks if one of them closes its run.
        """
        self._findings = collect(flow.outcome for flow in self.flows)
        self._has_lost[0] = bool(self._findings.lost)
        findings = [self._findings]
        if self._size > 1 and (await self._ending.run()).any():
            findings = await self._all_findings.run()
        outcome = step.outcome
        outcome.add(findings)
        if self._observes:
            self._observed = step.observed
            self.order = await self._order.run()
        return outcome

    def close(self) -> None:
        """Abort, on all ranks, what this rank has not begun of the step.  Does not wait."""
        if self._size > 1:
            self._ending.close()
        self._comparison.close()
        self._all_findings.close()
        if self._observes:
            self._order.close()
        for flow in self.flows:
            flow.close()

    async def _compare(self) -> None:
        try:
            self._keys.adopt(await self._comparison.run())
        except SettingsDiffer:
            self.is_refused = True
            raise
        self._agreed.set()


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the cause out of a task group's exceptions: that of this rank rather than a peer's cancelling."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = sorted(group.exceptions, key=lambda error: isinstance(error, PeerCancelled))
        raise errors[0] from errors[0].__cause__


def propose(
    groups: SyncGroups, keys: Keys, layout: BucketLayout, *, number: int, micro_steps: int, is_observed: bool
) -> Comparison:
    """Return the comparison of a step, which is the ``number``-th, with what all other ranks are about to do."""
    order = "known" if is_observed else "unknown"
    step = (f"step {number} of {micro_steps} micro-steps, order of gradients {order}",)
    if groups.is_data_parallel_only:
        digest = digest_of((*step, layout.digest.hex()))
        return _compare(groups, keys, {REPLICAS: (*step, *layout.lines)}, {REPLICAS: digest})
    lines = {
        ALL_RANKS: (*step, *layout.settings),
        REPLICAS: layout.lines,
        TENSOR_PARALLEL: layout.replicated,
        EMBEDDING: layout.tied,
    }
    return _compare(groups, keys, lines, {REPLICAS: layout.digest})


def propose_to_measure(groups: SyncGroups, keys: Keys) -> Comparison:
    """Return the comparison by which ranks find out whether all of them have yet to measure for ``"auto"``."""
    return _compare(groups, keys, dict.fromkeys(groups.partitions, ("the codec auto, not measured yet",)), {})


def refuse(groups: SyncGroups, keys: Keys, error: BaseException) -> Comparison:
    """Return the comparison by which all others learn that this rank cannot take the step."""
    line = (f"an error: {error}",)
    return _compare(groups, keys, dict.fromkeys(groups.partitions, line), {})


def _compare(groups: SyncGroups, keys: Keys, lines: Lines, digests: Mapping[str, bytes]) -> Comparison:
    return Comparison(
        groups.everyone,
        lines,
        groups.partitions,
        digests=digests,
        key=keys.agreement,
        rare=keys.rare,
        epoch=keys.epoch,
    )
