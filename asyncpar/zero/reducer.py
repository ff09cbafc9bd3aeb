"""Reduction of gradients to their owners, bucket by bucket in a fixed order."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from asyncpar.core.observe.records import EventState
from asyncpar.core.observe.steps import StepMeter
from asyncpar.errors import UsageError
from asyncpar.zero.buckets import BucketReduction, Contributions, Means
from asyncpar.zero.partition import without_frozen
from asyncpar.zero.tasks import first_failure, stopped


class Reducer:
    """Reduces buckets in their order, each when all its gradients are final.

    The order is the same on all ranks, whatever the order in which gradients become final, so that ranks with room for
    only some buckets never deadlock.  ``window`` is the number of buckets that have room.  ``meter`` records each round
    as a step.
    """

    def __init__(self, means: Means, *, window: int, meter: StepMeter) -> None:
        self._means = means
        self._window = asyncio.Semaphore(window)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._index = {share.parameter.name: index for index, share in enumerate(means.shares)}
        self._meter = meter
        self._rounds = 0
        self._round: _Round | None = None
        """The current round; frozen parameters are determined when it begins."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been reported in this round."""
        return self._round is None

    def ready(self, name: str) -> None:
        """Report that the gradient of the parameter ``name`` is final.  From any thread; does not wait."""
        index = self._index.get(name)
        if index is None:
            raise UsageError(f"name: expected a parameter of this engine, got {name!r}")
        with self._lock:
            current = self._round or self._begin_round()
            if index in current.reported:
                raise UsageError(
                    f"parameter {name}: its gradient was reported already; pass on_gradient in the last micro-batch "
                    f"only, or reduce() after each"
                )
            is_complete = self._report(current, index)
            if len(current.reported) == len(self._index):
                self._meter.waits()
        if is_complete and self._means.config.overlap_comm:
            self._loop.call_soon_threadsafe(self._launch, current)

    async def finish(self) -> None:
        """Reduce everything that is not reduced yet, and end the round.

        After a failure the round must be abandoned.
        """
        with self._lock:
            current = self._round or self._begin_round()
            self._meter.waits()
            for index in range(len(self._means.shares)):
                if index not in current.reported:
                    self._report(current, index)
        self._launch(current)
        await first_failure(current.tasks)
        for share in self._means.shares:
            share.has_gradient = True
        self._meter.end()
        self._round = None

    async def abandon(self) -> None:
        """End the round without a result, and abort it on all ranks.  Does not wait for other ranks."""
        current, self._round = self._round or _Round(self._means), None
        current.is_over = True
        self._meter.end(EventState.FAILED)
        await stopped(current.tasks)
        for reduction in current.reductions:
            reduction.give_up()

    def start_over(self) -> None:
        """Begin a new round on all ranks; the previous one was abandoned."""
        self._rounds = 0  # some ranks may have used one more than others
        self._round = None

    def _begin_round(self) -> _Round:
        self._rounds += 1
        self._meter.begin(self._rounds)
        self._meter.works()
        self._round = _Round(self._means)
        return self._round

    def _report(self, current: _Round, index: int) -> bool:
        """Record a final gradient; return whether that completes a bucket."""
        current.reported.add(index)
        if current.contributions is not None:
            gradient = self._means.shares[index].take_gradient()
            if index not in current.frozen:
                current.contributions.add(index, gradient)
        buckets = current.buckets_of.get(index, ())
        for bucket in buckets:
            current.missing[bucket] -= 1
        return any(not current.missing[bucket] for bucket in buckets)

    def _launch(self, current: _Round) -> None:
        """Start the buckets whose turn it is.  On the loop."""
        while not current.is_over and current.begun < len(current.reductions) and not current.missing[current.begun]:
            reduction = current.reductions[current.begun]
            current.begun += 1
            task = self._loop.create_task(self._reduce(reduction))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # ``finish`` checks it later
            current.tasks.append(task)

    async def _reduce(self, reduction: BucketReduction) -> None:
        async with self._window:
            await reduction.run()


class _Round:
    """One gradient of every parameter, except those that are currently frozen."""

    def __init__(self, means: Means) -> None:
        self.reported: set[int] = set()
        self.frozen = means.frozen
        buckets = without_frozen(means.partition, self.frozen)
        self.contributions = Contributions(buckets) if means.config.stage.shards_gradients else None
        self.missing = Counter({bucket.index: len(set(bucket.parameters)) for bucket in buckets})
        self.buckets_of: dict[int, list[int]] = {}
        for bucket in buckets:
            for parameter in dict.fromkeys(bucket.parameters):
                self.buckets_of.setdefault(parameter, []).append(bucket.index)
        detail = means.frozen_detail
        self.reductions = [BucketReduction(bucket, means, self.contributions, detail=detail) for bucket in buckets]
        self.tasks: list[asyncio.Task[None]] = []
        self.begun = 0
        self.is_over = False
