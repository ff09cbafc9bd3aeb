"""Run one bucket through the phases of a step: work in threads that take turns, collectives on the loop.

1. ``pack``: gradients, with what micro-steps have accumulated, go into the bucket.
2. ``tensor_parallel_phase``: the bucket of parameters that every tensor-parallel rank holds whole is averaged, or
   summed, over these ranks.  Slices are never added.
3. ``pipeline_phase``: the bucket of a tied tensor is summed over the first and the last stage; others take no part.
4. ``Scheme.reduction_steps``: the bucket is encoded, reduced over replicas, and decoded, as its scheme does it.
5. ``unpack``: the mean goes back into the gradients, once all buckets of all ranks are reduced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import INLINE_BYTES, off_loop
from asyncpar.core.config.placement import Replication
from asyncpar.core.records import dataclass
from asyncpar.errors import UsageError
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.groups import BucketKeys, Name, SyncGroups
from asyncpar.gradsync.plan import Bucket, HasGradient, Parameters, Slot
from asyncpar.gradsync.schemes import Place, ReductionStep, Scheme
from asyncpar.gradsync.statistics import BucketOutcome


class ThreadTurns:
    """Limits of threads: of ``sending`` work before a bucket's first message, and of ``receiving`` work after it.

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
            await step.run()
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
    """Settings that the flows of a step share.

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

    When a mean is not finite, which all replicas find alike, they exchange whose gradients were not finite.
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

        Afterwards ``scheme.result`` holds the reduced bucket, unless ``outcome`` says that there is none.
        """
        await self._run.take(self._steps, before=self._pack)
        if not self.scheme.is_finite:
            await self._explain()
        self._is_over = True

    def close(self) -> None:
        """Abort, on all ranks, the collectives that this rank has not begun.  Does not wait."""
        for step in self._steps:
            step.close()
        if not self._is_over:
            self._report.close()
            for step in self._again:
                step.close()

    def _make_steps(self, keys: BucketKeys, place: Place) -> list[ReductionStep]:
        """Return the steps of all phases, but for the packing before the first."""
        scheme, groups = self.scheme, self._settings.groups
        tp = tensor_parallel_phase(scheme, groups, keys.tp)
        pp = pipeline_phase(scheme, groups, keys.embedding)
        return [*(step for step in (tp, pp) if step is not None), *scheme.reduction_steps(keys.replicas, place)]

    def _pack(self) -> None:
        pack(self.scheme, self._settings.packing)

    async def _explain(self) -> None:
        """Find the ranks whose values are not finite, and reduce without them if the policy says so."""
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
        self._own = find_non_finite(self.scheme.bucket, self.scheme.payload)

    def _pack_zeros(self) -> None:
        self.scheme.payload.fill(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where gradients come from: ``(grad + accumulated) / micro_steps``.

    With ``as_views`` they lie in the bucket already, and nothing is copied.
    """

    parameters: Parameters
    accumulated: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    micro_steps: int = 1
    as_views: bool = False


def pack(scheme: Scheme, packing: Packing) -> None:
    """Copy the gradients into the bucket, unless they lie there."""
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, which encoding finds
        for slot in scheme.bucket.slots:
            place = scheme.flat[slot.start : slot.stop].reshape(slot.shape)
            gradient = packing.parameters[slot.name].grad
            if not (packing.as_views and gradient.ctypes.data == place.ctypes.data):
                np.copyto(place, gradient, casting="same_kind")
            if packing.micro_steps > 1:
                place += packing.accumulated[slot.name]
                place /= packing.micro_steps


def tensor_parallel_phase(scheme: Scheme, groups: SyncGroups, key: Name) -> ReductionStep | None:
    """Return the reduction over tensor-parallel ranks; None where the bucket or the configuration has none."""
    replicated, tp = scheme.bucket.placement.replicated, groups.tp
    if tp is None or replicated is None:
        return None
    op = "mean" if replicated is Replication.WHOLE else "sum"
    return ReductionStep(None, lambda: tp.all_reduce(scheme.payload, op=op, key=str(key)))


def pipeline_phase(scheme: Scheme, groups: SyncGroups, key: Name) -> ReductionStep | None:
    """Return the sum of a tied tensor over the first and the last stage; None where there is nothing to add."""
    tied, embedding = scheme.bucket.placement.tied, groups.embedding
    if embedding is None or tied is None:
        return None
    return ReductionStep(None, lambda: embedding.all_reduce(scheme.payload, key=str(key)))


def unpack(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
    """Write the reduced bucket times ``factor`` back into the gradients."""
    for slot in scheme.bucket.slots:
        gradient = parameters[slot.name].grad
        reduced = scheme.result[slot.start : slot.stop].reshape(slot.shape)
        if factor == 1.0:
            np.copyto(gradient, reduced, casting="same_kind")
        else:
            np.multiply(reduced, np.asarray(factor, reduced.dtype), out=gradient, casting="same_kind")


def unpack_as_views(scheme: Scheme, parameters: Parameters, *, factor: float) -> None:
    """Make the gradients views of the reduced bucket, after it was multiplied by ``factor``."""
    if factor != 1.0:
        scheme.result *= np.asarray(factor, scheme.result.dtype)
    for slot in scheme.bucket.slots:
        bind(parameters[slot.name], slot, scheme.result)
    scheme.swap()


def bind(parameter: HasGradient, slot: Slot, flat: NDArray[Any]) -> None:
    """Make ``parameter.grad`` the part of ``flat`` that ``slot`` says."""
    view = flat[slot.start : slot.stop].reshape(slot.shape)
    if view.dtype != parameter.grad.dtype:
        raise UsageError(
            f"gradient_as_bucket_view: expected gradients of {view.dtype}, which is what the bucket holds, "
            f"got {parameter.grad.dtype} of {parameter.name}"
        )
    try:
        cast(Any, parameter).grad = view
    except AttributeError as error:
        raise UsageError(f"gradient_as_bucket_view: expected a grad that can be set on {parameter.name}") from error


def find_non_finite(bucket: Bucket, packed: NDArray[Any]) -> list[str]:
    """Return the names of the parameters whose values in ``packed`` are not all finite."""
    return [slot.name for slot in bucket.slots if not np.isfinite(packed[slot.start : slot.stop]).all()]
