"""The gradient hook's side of the loop: buckets come in the order of calls and are reduced side by side.

A bucket that is new, in the first step and after DistributedDataParallel has rebuilt its buckets, is first described to
the other ranks, by an operation that takes its place in the order of all operations of the group: so ranks that differ
in their settings, parameters or hooks find out.  All other exchanges meet by name, in groups of their own.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncpar.codecs import Identity
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync.agreement import Disagreement, Lines, find_difference
from asyncpar.gradsync.choice import Resolved
from asyncpar.gradsync.groups import REPLICAS, SyncGroups
from asyncpar.gradsync.keys import Keys, Name
from asyncpar.gradsync.layout import SchemeMaker
from asyncpar.gradsync.schemes import Scheme
from asyncpar.gradsync.strategies import least_bytes
from asyncpar.gradsync.traffic import SyncTraffic
from asyncpar.gradsync.walk import ThreadTurns, Walk, WalkTimes
from asyncpar.torch.hook_bucket import GivenBucket
from asyncpar.torch.hook_exact import Prescaled
from asyncpar.torch.hook_memory import HookMemory, Seat
from asyncpar.torch.hook_settings import HookSettings
from asyncpar.torch.hook_statistics import HookTally, StepTally


@dataclass(slots=True, kw_only=True)
class _Step:
    """One backward pass; ``number`` is the same on all ranks."""

    number: int
    under_way: int = 0
    is_closed: bool = False
    """Has its last bucket begun?"""
    is_good: bool = True
    schemes: list[tuple[Seat, Scheme]] = field(default_factory=list)
    tally: StepTally = field(default_factory=StepTally)


class HookReducer:
    """Reduces buckets over the ranks of ``over``; made, and to be used, on its loop."""

    def __init__(self, over: Communicator, settings: HookSettings, memory: HookMemory, tally: HookTally) -> None:
        own = over.subgroup(range(over.size), name=f"the gradient hook of {over.name}")
        assert own is not None, "this rank is one of them"
        self._over = over
        self._own = own
        self._groups = SyncGroups(everyone=own, replicas=own, partitions={REPLICAS: (range(own.size),)})
        self._communicators: tuple[Communicator, ...] = (own,)
        self._settings = settings
        self._memory = memory
        self._tally = tally
        self._keys = Keys("gradients")
        self._turns = ThreadTurns(threads=max(1, (os.cpu_count() or 1) // 2))
        self._agreed = asyncio.Event()
        self._agreed.set()
        self._resolved: asyncio.Future[Resolved] | None = None
        self._step = _Step(number=memory.steps, is_closed=True)

    @property
    def is_idle(self) -> bool:
        """Is no bucket under way?"""
        return self._step.under_way == 0

    @property
    def traffic(self) -> SyncTraffic:
        """All that was sent for gradients."""
        return SyncTraffic.read(self._communicators)

    def begin(self, given: GivenBucket) -> Coroutine[Any, Any, None]:
        """Give the bucket its place in the order of operations; awaited, it replaces the gradients by their mean."""
        step = self._step_of(given)
        seat = self._memory.find(given)
        if seat is not None:
            return self._carry(step, seat, given)
        refusal: UsageError | None = None
        try:
            seat = self._memory.add(given)
            lines = [str(self._settings), f"step {step.number}", *seat.lines()]
        except UsageError as error:
            refusal, lines = error, [f"an error: {error}"]
        exchange = self._over.all_gather_object({REPLICAS: lines}, wanted=dict[str, list[str]])
        return self._introduce(step, given, exchange, seat if seat is not None else refusal)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _step_of(self, given: GivenBucket) -> _Step:
        """Return the step of a bucket that begins."""
        step = self._step
        if given.index == 0:
            if step.under_way:
                raise UsageError(
                    f"gradient_hook: expected the {step.under_way} buckets of the last backward pass to be through, "
                    "but they are under way; each model needs a GradientHook of its own"
                )
            self._memory.steps += 1
            step = self._step = _Step(number=self._memory.steps)
        step.under_way += 1
        step.is_closed = given.is_last
        return step

    async def _introduce(
        self,
        step: _Step,
        given: GivenBucket,
        exchange: Coroutine[Any, Any, list[Lines]],
        seat: Seat | UsageError | None,
    ) -> None:
        """Go on when all ranks are of one mind about a new bucket."""
        try:
            everything = await exchange
            if isinstance(seat, UsageError):
                raise seat
            difference = find_difference(everything, self._groups.partitions, self._over.ranks)
            if difference is not None:
                raise Disagreement(str(difference))
        except BaseException:
            self._memory.clear(given.index)  # so that it is new in the next step, too
            step.under_way -= 1
            step.is_good = False
            raise
        assert isinstance(seat, Seat), "ranks agree about it"
        await self._carry(step, seat, given)

    async def _carry(self, step: _Step, seat: Seat, given: GivenBucket) -> None:
        """Reduce a bucket that all ranks know."""
        begun = time.perf_counter()
        try:
            scheme = await self._scheme(step, seat, given)
            times = await self._reduce(step, seat, scheme, given)
        except BaseException:
            step.is_good = False
            raise
        finally:
            step.under_way -= 1
        step.schemes.append((seat, scheme))
        step.tally.add((begun, time.perf_counter()), times)
        step.tally.compressed += not isinstance(scheme, Prescaled)
        step.tally.not_finite += not scheme.is_finite
        step.tally.bytes_uncompressed += least_bytes(given.nbytes, self._own)
        if step.is_closed and step.is_good and not step.under_way:
            self._end(step)

    def _end(self, step: _Step) -> None:
        """All buckets are through.  Nobody uses a step that is not finite, so error feedback stays as it was."""
        if all(scheme.is_finite for _, scheme in step.schemes):
            for seat, scheme in step.schemes:
                scheme.commit()
                if isinstance(scheme, Prescaled):
                    self._memory.forget_residuals(seat)
        self._tally.add_step(step.tally, self.traffic)

    async def _scheme(self, step: _Step, seat: Seat, given: GivenBucket) -> Scheme:
        """Return what reduces the bucket in this step; the same on all ranks."""
        settings = self._settings
        if self._own.size > 1 and not settings.is_exact(nbytes=given.nbytes, step=step.number):
            if seat.lossy is None:
                resolved = (await self._resolve()).settled(seat.bucket.count)
                if resolved.codec != Identity():
                    await self._make(seat, resolved)
            if seat.lossy is not None:
                return seat.lossy
        return Prescaled(seat.bucket, self._own, looks=not settings.is_lossless)

    async def _make(self, seat: Seat, resolved: Resolved) -> None:
        """Make the scheme of ``seat``.  A rank that cannot tells the others, who would wait for it."""
        maker = SchemeMaker(
            groups=self._groups,
            hosts=resolved.hosts,
            codec=resolved.codec,
            has_feedback=self._settings.compression.error_feedback,
            algorithm=None,
            as_views=False,
        )
        failure: Exception | None = None
        try:
            self._memory.settle(seat, maker.make(seat.bucket))
        except Exception as error:  # noqa: BLE001  # raised below, when the others know
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        key = f"{self._keys.bucket(seat.bucket).replicas}/made"
        texts: list[str] = await self._own.all_gather_object(text, key=key, wanted=str)
        if failure is not None:
            raise failure
        for rank, other in zip(self._own.ranks, texts, strict=True):
            if other:
                raise PeerCancelled(f"rank {rank} cannot compress {seat.bucket}: {other}", rank=rank)

    async def _resolve(self) -> Resolved:
        """Return what the codec comes to, which the first bucket that needs it finds out."""
        if self._resolved is not None:
            return await asyncio.shield(self._resolved)
        self._resolved = found = asyncio.get_running_loop().create_future()
        try:
            resolved = await self._settings.resolve(self._groups, f"{self._keys.prefix}/auto")
        except BaseException:
            self._resolved = None
            found.cancel()
            raise
        hosts = () if resolved.hosts is None else resolved.hosts.all
        self._communicators = (self._own, *hosts)
        found.set_result(resolved)
        return resolved

    async def _reduce(self, step: _Step, seat: Seat, scheme: Scheme, given: GivenBucket) -> WalkTimes:
        """Take the bucket through ``scheme``; no rank waits for this one if it fails."""
        key: Name = self._keys.bucket(seat.bucket).replicas
        legs = scheme.legs(key, (step.number, zlib.crc32(seat.bucket.shared_name.encode())))
        passage = _Passage(scheme, given, is_lent=scheme.lend(given.array), ranks=self._own.size)
        walk = Walk(scheme=scheme, turns=self._turns, agreed=self._agreed)
        try:
            if isinstance(scheme, Prescaled):
                await walk.take(legs, before=lambda: passage.divide(self._memory, seat))
            else:
                await walk.take(legs, before=passage.read, after=passage.write)
        except BaseException:
            scheme.spoil()
            for leg in legs:
                await leg.exchange.give_up()
            raise
        return walk.times


@dataclass(frozen=True, slots=True)
class _Passage:
    """How gradients get into a scheme and out of it.  In threads."""

    scheme: Scheme
    given: GivenBucket
    is_lent: bool
    ranks: int

    def divide(self, memory: HookMemory, seat: Seat) -> None:
        """Add what earlier steps owe, and divide by the number of ranks as torch does it."""
        for slot, values in memory.waiting(seat):
            self.given.add(slice(slot.start, slot.stop), values)
        self.given.scale(1.0 / self.ranks)

    def read(self) -> None:
        if not self.is_lent:
            self.given.read_into(self.scheme.payload)

    def write(self) -> None:
        """Make the gradients the mean; all of them NaN if some are not finite on some rank."""
        if not self.scheme.is_finite:
            self.given.fill(float("nan"))
            return
        factor = self.scheme.factor(self.ranks)
        if factor != 1.0:
            reduced = self.scheme.reduced
            np.multiply(reduced, np.float32(factor), out=reduced)
        if not self.is_lent:
            self.given.write(self.scheme.reduced)
