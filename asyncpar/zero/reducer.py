"""Reduce gradients to their owners, bucket by bucket in a fixed order."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from asyncpar.core.observe.records import EventState
from asyncpar.core.observe.steps import StepMeter
from asyncpar.errors import UsageError
from asyncpar.zero.buckets import BucketReduction, Contributions, Means
from asyncpar.zero.tasks import first_failure, stopped


class Reducer:
    """Reduces buckets in their order, each when all its gradients are final.

    The order is the same on all ranks whatever order gradients become final in, so that ranks that have room for some
    buckets only never wait for each other in a circle.  ``window`` is how many have room.
    ``meter`` records each round as a step.
    """

    def __init__(self, means: Means, *, window: int, meter: StepMeter) -> None:
        self._means = means
        self._window = asyncio.Semaphore(window)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._index = {share.parameter.name: index for index, share in enumerate(means.shares)}
        self._buckets_of = [means.partition.buckets_of(index) for index in range(len(means.shares))]
        self._meter = meter
        self._rounds = 0
        self._round = self._new_round()

    @property
    def is_idle(self) -> bool:
        """Has nothing been reported in this round?"""
        return not self._round.reported

    def ready(self, name: str) -> None:
        """Report that the gradient of the parameter ``name`` is final.  From any thread; does not wait."""
        index = self._index.get(name)
        if index is None:
            raise UsageError(f"name: expected a parameter of this engine, got {name!r}")
        with self._lock:
            if index in self._round.reported:
                raise UsageError(
                    f"parameter {name}: its gradient was reported already; pass on_gradient in the last micro-batch "
                    f"only, or reduce() after each"
                )
            if self.is_idle:
                self._begin_round()
            current, is_complete = self._round, self._report(index)
            if len(current.reported) == len(self._index):
                self._meter.waits()
        if is_complete and self._means.config.overlap_comm:
            self._loop.call_soon_threadsafe(self._launch, current)

    async def finish(self) -> None:
        """Reduce everything that is not reduced yet, and end the round.

        After a failure the round must be abandoned.
        """
        current = self._round
        with self._lock:
            if self.is_idle:
                self._begin_round()
            self._meter.waits()
            for index in range(len(self._means.shares)):
                if index not in current.reported:
                    self._report(index)
        self._launch(current)
        await first_failure(current.tasks)
        for share in self._means.shares:
            share.has_gradient = True
        self._meter.end()
        self._round = self._new_round()

    async def abandon(self) -> None:
        """End the round without a result, and abort it on all ranks.  Does not wait for other ranks."""
        current, self._round = self._round, self._new_round()
        current.is_over = True
        self._meter.end(EventState.FAILED)
        await stopped(current.tasks)
        for reduction in current.reductions:
            reduction.give_up()

    def start_over(self) -> None:
        """Begin a round with nothing reported, on all ranks; the one before was abandoned."""
        self._rounds = 0  # some ranks may have had one more than others
        self._round = self._new_round()

    def _begin_round(self) -> None:
        self._rounds += 1
        self._meter.begin(self._rounds)
        self._meter.works()

    def _report(self, index: int) -> bool:
        """Take note of a gradient; return whether that makes a bucket complete."""
        current = self._round
        current.reported.add(index)
        if current.contributions is not None:
            current.contributions.add(index, self._means.shares[index].take_gradient())
        for bucket in self._buckets_of[index]:
            current.missing[bucket] -= 1
        return any(not current.missing[bucket] for bucket in self._buckets_of[index])

    def _launch(self, current: _Round) -> None:
        """Begin the buckets whose turn it is.  On the loop."""
        while not current.is_over and current.begun < len(current.reductions) and not current.missing[current.begun]:
            reduction = current.reductions[current.begun]
            current.begun += 1
            task = self._loop.create_task(self._reduce(reduction))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # ``finish`` looks at it later
            current.tasks.append(task)

    async def _reduce(self, reduction: BucketReduction) -> None:
        async with self._window:
            await reduction.run()

    def _new_round(self) -> _Round:
        return _Round(self._means)


class _Round:
    """One gradient of every parameter."""

    def __init__(self, means: Means) -> None:
        self.reported: set[int] = set()
        shards_gradients = means.config.stage.shards_gradients
        self.contributions = Contributions(means.partition) if shards_gradients else None
        buckets = means.partition.buckets
        self.missing = Counter({bucket.index: len(set(bucket.parameters)) for bucket in buckets})
        self.reductions = [BucketReduction(bucket, means, self.contributions) for bucket in buckets]
        self.tasks: list[asyncio.Task[None]] = []
        self.begun = 0
        self.is_over = False
