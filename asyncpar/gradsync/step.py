"""One step: final gradients, the comparison of ranks, the runs of all buckets, and the ending.

A bucket goes through the phases of a step: work in threads that take turns, collectives on the loop.

1. ``layout_cache.pack``: gradients, with what micro-steps have accumulated, go into the bucket.
2. ``tensor_parallel_phase``: the bucket of parameters that every tensor-parallel rank holds whole is averaged, or
   summed, over these ranks.  Slices are never added.
3. ``pipeline_phase``: the bucket of a tied tensor is summed over the first and the last stage; others take no part.
4. ``Scheme.reduction_steps``: the bucket is encoded, reduced over replicas, and decoded, as its scheme does it.
5. ``layout_cache.unpack``: the mean goes back into the gradients, once all buckets of all ranks are reduced.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import Comparison, Lines, OwedCollective, digest_of
from asyncpar.collectives.communicator import Communicator, bucket_span, skip_use
from asyncpar.core.concurrency.tasks import INLINE_BYTES, CleanTaskGroup, off_loop
from asyncpar.core.config.names import ReduceOp
from asyncpar.core.config.placement import Replication
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync import layout_cache
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.early_update import UpdateFeed
from asyncpar.gradsync.groups import ALL_RANKS, EMBEDDING, REPLICAS, TENSOR_PARALLEL, BucketKeys, Keys, Name, SyncGroups
from asyncpar.gradsync.layout import BucketLayout
from asyncpar.gradsync.plan import BucketPlan
from asyncpar.gradsync.schemes import Place, ReductionStep, Scheme
from asyncpar.gradsync.settings_cache import SettingsCache
from asyncpar.gradsync.statistics import BucketOutcome, NonFiniteFindings, StepOutcome, StepRecord, collect
from asyncpar.gradsync.tuned_steps import FIGURES, StepTuning


class SyncStep:
    """The step that ``GradientSynchronizer.step`` yields.  Report final gradients by ``ready``, from any thread."""

    def __init__(
        self,
        plan: BucketPlan,
        *,
        frozen: Collection[str],
        overlap: bool,
        take_final: Callable[[int | None, str], None] | None,
        all_final: Callable[[], None],
    ) -> None:
        self.record = StepRecord()
        self.outcome = StepOutcome()
        self.observed: list[str] = []
        """Names in the order in which they were reported."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._known = {spec.name for spec in plan.specs}
        self._frozen = frozenset(frozen)
        self._unreported = set(self._known)
        self._bucket_of = {slot.name: bucket.index for bucket in plan.buckets for slot in bucket.slots}
        self._missing = [len(bucket.slots) for bucket in plan.buckets]
        self._complete = [asyncio.Event() for _ in plan.buckets]
        self._in_turn = [bucket.index for bucket in sorted(plan.buckets, key=lambda bucket: bucket.turn)]
        self._overlap = overlap
        self._turns = asyncio.Semaphore(len(plan.buckets) if overlap else 1)
        self._is_over = False
        self._take_final = take_final
        """Called with a bucket and a name when a gradient is final, in the thread that reports it."""
        self._all_final = all_final
        """Called when the last gradient is final."""

    def ready(self, name: str) -> None:
        """Report that the gradient of ``name`` will not change any more in this step.

        Its bucket starts when all of its gradients are final.  Callable from any thread; once per name and step, else
        ``UsageError``.  After a step has failed, and for frozen parameters, calls have no effect: a worker thread need
        not know.
        """
        if name in self._frozen:
            return
        with self._lock:
            if name not in self._known:
                raise UsageError(f"name: expected a parameter of this step, got {name!r}")
            if self._is_over:
                return
            if name not in self._unreported:
                raise UsageError(f"name: the gradient of {name!r} was already reported, or the step's block was left")
            self._unreported.remove(name)
            self.observed.append(name)
            if not self._unreported:
                self._all_final()
            index = self._bucket_of.get(name)
            if index is None:  # a gradient without values is in no bucket
                return
            if self._take_final is not None:
                self._take_final(index, name)
            self._missing[index] -= 1
            if self._missing[index] == 0 and self._overlap:
                self._loop.call_soon_threadsafe(self._complete[index].set)

    def finish(self) -> None:
        """Treat every gradient as final: the caller's block is done.  Called on the loop's thread."""
        with self._lock:
            if self._take_final is not None:
                for name in self._unreported:
                    self._take_final(self._bucket_of.get(name), name)
            self._unreported.clear()
        self._all_final()
        self.record.last_gradient_at = self._loop.time()
        for index in self._in_turn:
            self._complete[index].set()

    def close(self) -> None:
        """Ignore later reports of worker threads."""
        with self._lock:
            self._is_over = True

    async def carry(self, flow: BucketFlow) -> None:
        """Run ``flow`` when its bucket is complete; without overlap, when its turn comes."""
        await self._complete[flow.scheme.bucket.index].wait()
        async with self._turns:
            start = self._loop.time()
            await flow.run()
            self.record.intervals.append((start, self._loop.time()))


class StepRun:
    """One step on this rank.

    Flows exchange nothing before ``agreed`` is set, after the comparison that ``propose`` returns, or at once where
    ``cache`` is given, which holds for this step; then ``propose`` and ``make_flows`` are called only if that turns out
    to be wrong.  With ``observes`` all ranks use, from the next step on, the order in which gradients became final on
    the first replica.  ``tuning`` measures, and ranks exchange its figures at the end.
    """

    def __init__(
        self,
        propose: Callable[[], Comparison],
        make_flows: Callable[[], Sequence[BucketFlow]],
        groups: SyncGroups,
        *,
        keys: Keys,
        agreed: asyncio.Event,
        observes: bool,
        feed: UpdateFeed | None = None,
        tuning: StepTuning | None = None,
        cache: SettingsCache | None = None,
    ) -> None:
        self.flows = make_flows()
        self.feed = feed
        self.order: list[str] | None = None
        self.is_refused = False
        """Whether ranks differ.  All of them know, so none has to be notified."""
        self._make_flows = make_flows
        self._cache = cache
        self._propose = propose
        self._comparison = propose() if cache is None else None
        self._is_skipped = False
        self._keys = keys
        self._agreed = agreed
        self._observed: list[str] = []
        self._findings = NonFiniteFindings({}, [])
        self._tuning = tuning
        self._ended: NDArray[Any] = np.zeros(1, np.uint8) if tuning is None else np.zeros(1 + FIGURES)
        """Whether something was lost on this rank; with ``tuning``, followed by its figures."""
        self.measured: NDArray[np.float64] | None = None
        """The figures of each rank, in rows, once the step has ended."""
        self._size = groups.everyone.size
        everyone, replicas = groups.everyone, groups.replicas
        self._everyone = everyone
        self._ending = self._owe_ending()
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
        if self._cache is not None:
            tasks.create_task(self._run_without_comparison(step, self._cache), name="gradients/buckets")
        else:
            tasks.create_task(self._compare(), name="gradients/agreement")
            self._start_flows(step, tasks)
        if self.feed is not None:
            tasks.create_task(self.feed.run(), name="gradients/update")

    def finish(self, step: SyncStep) -> None:
        """End the step's block."""
        step.finish()
        if self._tuning is not None:
            self._tuning.all_final()
        if self.feed is not None:
            self.feed.open()

    async def end(self, step: SyncStep) -> StepOutcome:
        """Return the outcome of the step, on all ranks of all groups, after all flows have run.

        No rank writes gradients before this returns, and it raises on all ranks if one of them closes its run.
        """
        self._findings = collect(flow.outcome for flow in self.flows)
        self._ended[0] = bool(self._findings.lost)
        if self._tuning is not None:
            self._ended[1:] = self._tuning.measure()
        findings = [self._findings]
        if self._size > 1:
            ended = await self._ending.run()
            self._skip_comparison()
            self.measured = None if self._tuning is None else ended[:, 1:]
            if ended[:, 0].any():
                findings = await self._all_findings.run()
        outcome = step.outcome
        outcome.add(findings)
        if self._observes:
            self._observed = step.observed
            self.order = await self._order.run()
        return outcome

    def close(self) -> None:
        """Abort, on all ranks, the parts of the step that this rank has not begun.  Does not wait."""
        if self._size > 1:
            self._ending.close()
        if not self._is_skipped:
            (self._comparison or self._propose()).close()
        self._all_findings.close()
        if self._observes:
            self._order.close()
        self._close_flows()

    def _close_flows(self) -> None:
        for flow in self.flows:
            flow.close()

    def _start_flows(self, step: SyncStep, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        in_turn = sorted(self.flows, key=lambda flow: flow.scheme.bucket.turn)
        return [tasks.create_task(step.carry(flow), name=flow.name) for flow in in_turn]

    async def _run_without_comparison(self, step: SyncStep, cache: SettingsCache) -> None:
        """Run the flows at once; if another rank announces a change meanwhile, compare, and run them again.

        See ``settings_cache``.
        """
        self._agreed.set()
        with first_error():
            async with CleanTaskGroup() as tasks:
                flows = self._start_flows(step, tasks)

                def cancel() -> None:
                    for flow in flows:
                        flow.cancel()

                cache.on_change(cancel)
        cache.on_change(None)
        if not any(flow.cancelled() for flow in flows):
            return
        self._ending.close()
        self._close_flows()
        cache.begin_epoch()
        self._agreed.clear()
        self._ending = self._owe_ending()
        self.flows = self._make_flows()
        self._comparison = self._propose()
        await self._compare()
        with first_error():
            async with CleanTaskGroup() as tasks:
                self._start_flows(step, tasks)

    def _skip_comparison(self) -> None:
        """Use up the name of the comparison even if there was none: see ``Keys``."""
        if self._comparison is None:
            skip_use(self._everyone, self._keys.comparison)
            self._is_skipped = True

    def _owe_ending(self) -> OwedCollective[NDArray[Any]]:
        everyone, key = self._everyone, self._keys.ending
        return OwedCollective(lambda: everyone.all_gather(self._ended, key=str(key)))

    async def _compare(self) -> None:
        assert self._comparison is not None, "the step is one with a comparison"
        try:
            self._keys.adopt(await self._comparison.run())
        except SettingsDiffer:
            self.is_refused = True
            raise
        self._agreed.set()


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the cause of a task group's failure: this rank's error rather than a peer's cancellation."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = sorted(group.exceptions, key=lambda error: isinstance(error, PeerCancelled))
        raise errors[0] from errors[0].__cause__


def propose(
    groups: SyncGroups,
    keys: Keys,
    layout: BucketLayout,
    *,
    number: int,
    micro_steps: int,
    is_observed: bool,
    tuning: str = "",
) -> Comparison:
    """Return the comparison of the ``number``-th step with the intended steps of all other ranks."""
    order = "known" if is_observed else "unknown"
    step = (f"step {number} of {micro_steps} micro-steps, order of gradients {order}{tuning}",)
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
        key=keys.comparison,
        rare=keys.rare,
        epoch=keys.epoch,
    )


class ThreadTurns:
    """Limits of threads: for ``sending`` work before a bucket's first message, and for ``receiving`` work after it.

    A few of each kind run at a time, in order of request.  Otherwise buckets that are ready together would all be
    encoded together, and the wire would be idle until the first is done, which is almost when the last one is.
    """

    def __init__(self, *, threads: int) -> None:
        self.sending = asyncio.Semaphore(threads)
        self.receiving = asyncio.Semaphore(threads)


@dataclass(slots=True, kw_only=True)
class RunTimes:
    """Seconds of one run: of work before and after the first message, without waits for threads, and of collectives."""

    sending: float = 0.0
    receiving: float = 0.0
    exchanging: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRun:
    """One run of the steps of ``scheme``.  No collective begins before ``agreed`` is set.

    ``waits``: packing waits for a device, so it must not be done on the loop.
    """

    scheme: Scheme
    turns: ThreadTurns
    agreed: asyncio.Event
    waits: bool = False
    times: RunTimes = field(default_factory=RunTimes)

    async def take(
        self, steps: Sequence[ReductionStep], *, before: Callable[[], None], after: Callable[[], None] | None = None
    ) -> None:
        """Take ``steps`` and settle the scheme after the last.

        ``before`` is done together with the work of the first, ``after`` with the settling.
        """
        works: list[Callable[[], None]] = [before]
        is_first = True
        for step in steps:
            works += [] if step.work is None else [step.work]
            await self.work(works, is_first=is_first)
            await self.agreed.wait()
            begun = time.perf_counter()
            await step.run()
            self.times.exchanging += time.perf_counter() - begun
            works, is_first = [], False
        await self.work([*works, self.scheme.settle, *([] if after is None else [after])], is_first=is_first)

    async def work(self, works: Sequence[Callable[[], None]], *, is_first: bool) -> None:
        """Do ``works``, in a thread in turn if they would block the loop."""
        nbytes = self.scheme.flat.nbytes
        if not works:
            return
        work = partial(self._do, works, is_first=is_first)
        waits = self.waits and is_first
        if nbytes <= INLINE_BYTES and not waits:
            work()
            return
        async with self.turns.sending if is_first else self.turns.receiving:
            await off_loop(work, nbytes=nbytes, inline=0 if waits else INLINE_BYTES)

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
    """Settings that the flows of a step share.

    Nothing is exchanged before ``agreed`` is set.  ``step`` is the number of the step, part of the keys that are used
    only when something is not finite.
    """

    groups: SyncGroups
    packing: layout_cache.Packing
    policy: NonFinitePolicy
    turns: ThreadTurns
    agreed: asyncio.Event
    step: int
    feed: UpdateFeed | None = None


class BucketFlow:
    """One bucket in one step.  Gradients are only read.

    When a mean is not finite, which all replicas find alike, they exchange which ranks had non-finite gradients.
    """

    def __init__(self, scheme: Scheme, *, keys: BucketKeys, place: Place, settings: FlowSettings) -> None:
        self.scheme = scheme
        self.name = str(keys.replicas)
        self._settings = settings
        self._run = BucketRun(
            scheme=scheme, turns=settings.turns, agreed=settings.agreed, waits=settings.packing.fetch is not None
        )
        self._is_over = False
        feed = settings.feed
        self._reports_parts = scheme.report_parts(None if feed is None else partial(feed.put, scheme))
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

        Afterwards ``scheme.result`` holds the reduced bucket, unless ``outcome`` reports that there is none.
        """
        scheme = self.scheme
        with bucket_span(self._settings.groups.replicas, scheme.bucket.index, scheme.flat.nbytes, scheme.codec_name):
            await self._run.take(self._steps, before=self._pack)
            if not self.scheme.is_finite:
                await self._explain()
            self._feed_rest()
        self._is_over = True

    def _feed_rest(self) -> None:
        feed = self._settings.feed
        if feed is not None:
            if not self._reports_parts:
                feed.put(self.scheme, 0, self.scheme.bucket.count)
            feed.flow_is_over()

    def close(self) -> None:
        """Abort, on all ranks, the collectives that this rank has not begun.  Does not wait."""
        for step in self._steps:
            step.close()
        if not self._is_over:
            self._report.close()
            for step in self._again:
                step.close()

    def _make_steps(self, keys: BucketKeys, place: Place) -> list[ReductionStep]:
        """Return the steps of all phases, except the packing before the first."""
        scheme, groups = self.scheme, self._settings.groups
        tp = tensor_parallel_phase(scheme, groups, keys.tp)
        pp = pipeline_phase(scheme, groups, keys.embedding)
        return [*(step for step in (tp, pp) if step is not None), *scheme.reduction_steps(keys.replicas, place)]

    def _pack(self) -> None:
        layout_cache.pack(self.scheme, self._settings.packing)

    async def _explain(self) -> None:
        """Find the ranks with non-finite values, and reduce without them if the policy is to drop them."""
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
        self._own = layout_cache.find_non_finite(self.scheme)

    def _pack_zeros(self) -> None:
        self.scheme.payload.fill(0.0)


def tensor_parallel_phase(scheme: Scheme, groups: SyncGroups, key: Name) -> ReductionStep | None:
    """Return the reduction over tensor-parallel ranks; None if the bucket or the configuration has none."""
    replicated, tp = scheme.bucket.placement.replicated, groups.tp
    if tp is None or replicated is None:
        return None
    op: ReduceOp = "mean" if replicated is Replication.WHOLE else "sum"
    return ReductionStep(None, lambda: tp.all_reduce(scheme.payload, op=op, key=str(key)))


def pipeline_phase(scheme: Scheme, groups: SyncGroups, key: Name) -> ReductionStep | None:
    """Return the sum of a tied tensor over the first and the last stage; None if there is nothing to add."""
    tied, embedding = scheme.bucket.placement.tied, groups.embedding
    if embedding is None or tied is None:
        return None
    return ReductionStep(None, lambda: embedding.all_reduce(scheme.payload, key=str(key)))
