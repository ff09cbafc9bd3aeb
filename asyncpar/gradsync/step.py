"""One step: which gradients are final, and which buckets may therefore go."""

from __future__ import annotations

import asyncio
import threading

from asyncpar.errors import UsageError
from asyncpar.gradsync.flow import BucketFlow
from asyncpar.gradsync.outcome import StepOutcome
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
