"""The gradient hook's side of the loop: buckets come in the order of calls and are reduced side by side.

A bucket that is new, in the first step and after DistributedDataParallel has rebuilt its buckets, is first described to
the other ranks, by an operation that takes its place in the order of all operations of the group: so ranks that differ
in their settings, parameters or hooks find out.  All other exchanges meet by name, in groups of their own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from asyncpar.agreement.comparison import Lines, find_difference
from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.codecs import Identity
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync.bucket_run import BucketRun, RunTimes, ThreadTurns
from asyncpar.gradsync.choice import Resolved
from asyncpar.gradsync.groups import REPLICAS, SyncGroups
from asyncpar.gradsync.keys import Keys
from asyncpar.gradsync.layout import SchemeMaker, least_bytes
from asyncpar.gradsync.schemes import Scheme
from asyncpar.gradsync.statistics import SyncTraffic
from asyncpar.torch.hook.bucket import GivenBucket
from asyncpar.torch.hook.exact import Prescaled
from asyncpar.torch.hook.memory import HookMemory, Seat
from asyncpar.torch.hook.passage import HookPassage
from asyncpar.torch.hook.settings import HookSettings
from asyncpar.torch.hook.statistics import HookTally, StepTally

_NUMBER = "number"


@dataclass(slots=True, kw_only=True)
class _Step:
    """One backward pass; ``number`` is the same on all ranks, and so is ``hook``, empty before they know each other."""

    number: int
    hook: str
    under_way: int = 0
    is_closed: bool = False
    """Has its last bucket begun?"""
    is_good: bool = True
    is_forgotten: bool = False
    """Must its buckets be introduced again?"""
    schemes: list[tuple[Seat, Scheme]] = field(default_factory=list)
    tally: StepTally = field(default_factory=StepTally)


@dataclass(slots=True, kw_only=True)
class _Circle:
    """The ranks of a hook among themselves, and ``communicators``, all by which they reduce gradients."""

    own: Communicator
    groups: SyncGroups
    communicators: tuple[Communicator, ...]

    @classmethod
    def of(cls, over: Communicator, hook: str) -> _Circle:
        """Return the circle of the ranks that call it by one name.  Nothing is sent."""
        own = over.subgroup(range(over.size), key=f"gradient hook {hook}", name=f"the gradient hook of {over.name}")
        assert own is not None, "this rank is one of them"
        groups = SyncGroups(everyone=own, replicas=own, partitions={REPLICAS: (range(own.size),)})
        return cls(own=own, groups=groups, communicators=(own,))


class HookReducer:
    """Reduces buckets over the ranks of ``over``; made, and to be used, on its loop."""

    def __init__(self, over: Communicator, settings: HookSettings, memory: HookMemory, tally: HookTally) -> None:
        self._over = over
        self._circle: _Circle | None = None
        self._number = secrets.token_hex(8)
        self._settings = settings
        self._memory = memory
        self._tally = tally
        self._keys = Keys("gradients")
        self._turns = ThreadTurns(threads=max(1, (os.cpu_count() or 1) // 2))
        self._agreed = asyncio.Event()
        self._agreed.set()
        self._resolved: asyncio.Future[Resolved] | None = None
        self._step = _Step(number=memory.steps, hook="", is_closed=True)

    @property
    def is_idle(self) -> bool:
        """Is no bucket under way?"""
        return self._step.under_way == 0

    @property
    def traffic(self) -> SyncTraffic:
        """All that was sent for gradients."""
        return SyncTraffic.read(() if self._circle is None else self._circle.communicators)

    def begin(self, given: GivenBucket) -> Coroutine[Any, Any, None]:
        """Give the bucket its place in the order of operations; awaited, it replaces the gradients by their mean."""
        step = self._step_of(given)
        seat = self._memory.find(given)
        if seat is not None:
            return self._carry(step, seat, given)
        refusal: UsageError | None = None
        try:
            seat = self._memory.add(given)
            hook = f"hook {step.hook}" if step.hook else "a new hook"
            lines = [str(self._settings), f"step {step.number} of {hook}", *seat.lines()]
        except UsageError as error:
            refusal, lines = error, [f"an error: {error}"]
        told = {REPLICAS: lines, _NUMBER: [self._number]}
        exchange = self._over.all_gather_object(told, wanted=dict[str, list[str]])
        return self._introduce(step, given, exchange, seat if seat is not None else refusal)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _step_of(self, given: GivenBucket) -> _Step:
        """Return the step of a bucket that begins."""
        step = self._step
        if given.index == 0:
            if step.under_way:
                raise UsageError(
                    f"gradient_hook: expected the {step.under_way} buckets of the last backward pass to be through, "
                    "but they are under way"
                )
            if step.is_forgotten:
                self._memory.clear()
            self._memory.steps += 1
            hook = "" if self._circle is None else self._number
            step = self._step = _Step(number=self._memory.steps, hook=hook)
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
            difference = find_difference(everything, {REPLICAS: (range(self._over.size),)}, self._over.ranks)
            if difference is not None:
                raise SettingsDiffer(str(difference))
            if self._circle is None:
                (self._number,) = everything[0][_NUMBER]
                self._circle = _Circle.of(self._over, self._number)
        except BaseException:
            step.under_way -= 1
            step.is_good = False
            step.is_forgotten = True
            raise
        assert isinstance(seat, Seat), "ranks agree about it"
        await self._carry(step, seat, given)

    async def _carry(self, step: _Step, seat: Seat, given: GivenBucket) -> None:
        """Reduce a bucket that all ranks know."""
        assert self._circle is not None, "it was introduced"
        circle, begun = self._circle, time.perf_counter()
        try:
            scheme = await self._scheme(circle, step, seat, given)
            times = await self._reduce(circle, step, seat, scheme, given)
        except BaseException:
            step.is_good = False
            raise
        finally:
            step.under_way -= 1
        step.schemes.append((seat, scheme))
        step.tally.add((begun, time.perf_counter()), times)
        step.tally.compressed += not isinstance(scheme, Prescaled)
        step.tally.not_finite += not scheme.is_finite
        step.tally.bytes_uncompressed += least_bytes(given.nbytes, circle.own)
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

    async def _scheme(self, circle: _Circle, step: _Step, seat: Seat, given: GivenBucket) -> Scheme:
        """Return what reduces the bucket in this step; the same on all ranks."""
        settings = self._settings
        if circle.own.size > 1 and not settings.is_exact(nbytes=given.nbytes, step=step.number):
            if seat.lossy is None:
                resolved = (await self._resolve(circle)).settled(seat.bucket.count)
                if resolved.codec != Identity():
                    await self._make(circle, step, seat, resolved)
            if seat.lossy is not None:
                return seat.lossy
        return Prescaled(seat.bucket, circle.own, looks=not settings.is_lossless)

    async def _make(self, circle: _Circle, step: _Step, seat: Seat, resolved: Resolved) -> None:
        """Make the scheme of ``seat``.  A rank that cannot tells the others, who would wait for it."""
        maker = SchemeMaker(
            groups=circle.groups,
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
        texts: list[str] = await circle.own.all_gather_object(text, key=key, wanted=str)
        step.is_forgotten |= any(texts)
        if failure is not None:
            raise failure
        for rank, other in zip(circle.own.ranks, texts, strict=True):
            if other:
                raise PeerCancelled(f"rank {rank} cannot compress {seat.bucket}: {other}", rank=rank)

    async def _resolve(self, circle: _Circle) -> Resolved:
        """Return what the codec comes to, which the first bucket that needs it finds out."""
        if self._resolved is not None:
            return await asyncio.shield(self._resolved)
        self._resolved = found = asyncio.get_running_loop().create_future()
        try:
            resolved = await self._settings.resolve(circle.groups, f"{self._keys.prefix}/auto")
        except BaseException:
            self._resolved = None
            found.cancel()
            raise
        circle.communicators = (circle.own, *(() if resolved.hosts is None else resolved.hosts.all))
        found.set_result(resolved)
        return resolved

    async def _reduce(self, circle: _Circle, step: _Step, seat: Seat, scheme: Scheme, given: GivenBucket) -> RunTimes:
        """Take the bucket through ``scheme``; no rank waits for this one if it fails."""
        key = self._keys.bucket(seat.bucket).replicas
        steps = scheme.reduction_steps(key, (step.number, zlib.crc32(seat.bucket.shared_name.encode())))
        passage = HookPassage(scheme, given, is_lent=scheme.lend(given.array), ranks=circle.own.size)
        run = BucketRun(scheme=scheme, turns=self._turns, agreed=self._agreed)
        try:
            if isinstance(scheme, Prescaled):
                await run.take(steps, before=lambda: passage.divide(self._memory, seat))
            else:
                await run.take(steps, before=passage.read, after=passage.write)
        except BaseException:
            for reduction in steps:
                reduction.close()
            raise
        return run.times
