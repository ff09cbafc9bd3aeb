"""Reduction of the buckets of a gradient hook on the event loop, several at a time, in the order of calls.

A new bucket, in the first step and after DistributedDataParallel has rebuilt its buckets, is first described to the
other ranks, by an operation in the order of all operations of the group, so a difference between ranks in settings,
parameters or hooks is an error.  All other exchanges are matched by name, in separate groups.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import Difference, Lines, find_difference
from asyncpar.codecs import Identity
from asyncpar.collectives.call import cancel_reason
from asyncpar.collectives.communicator import Communicator, bucket_span
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync import GradientCompressionConfig, HostGroups
from asyncpar.gradsync.choice import Resolved, resolve
from asyncpar.gradsync.groups import REPLICAS, Keys, SyncGroups
from asyncpar.gradsync.layout import SchemeMaker, least_bytes
from asyncpar.gradsync.schemes import ReductionStep, Scheme
from asyncpar.gradsync.statistics import SyncTraffic
from asyncpar.gradsync.step import BucketRun, RunTimes, ThreadTurns
from asyncpar.torch.hook.bucket import BucketTransfer, HookBucket, UncompressedSum
from asyncpar.torch.hook.state import BucketState, HookMemory, HookTally, StepTally

Hosts: TypeAlias = Sequence[Sequence[int]] | bool
"""Ranks of the group by host; True: by their actual hosts; False: each rank as a host of its own."""

MINIMUM_BYTES = 1 << 14
"""Latency, not size, determines the time of smaller messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """The codec of each bucket; the same on all ranks."""

    compression: GradientCompressionConfig
    minimum_bytes: int = MINIMUM_BYTES
    warm_up_steps: int = 0
    hosts: Hosts = True

    def __post_init__(self) -> None:
        for name in ("minimum_bytes", "warm_up_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name}: expected a number of 0 or more, got {value!r}")

    @property
    def is_lossless(self) -> bool:
        """Whether no bucket uses a codec."""
        return not self.compression.is_automatic and self.compression.make_codec() == Identity()

    def is_exact(self, *, nbytes: int, step: int) -> bool:
        """Return whether a bucket of ``nbytes`` is left uncompressed in ``step``; the first step is 1."""
        return self.is_lossless or step <= self.warm_up_steps or nbytes < self.minimum_bytes

    async def resolve(self, groups: SyncGroups, key: str) -> Resolved:
        """Return the codec to use.  ``"auto"`` takes an exchange between all ranks."""
        given = None if isinstance(self.hosts, bool) else HostGroups.of(groups.replicas, self.hosts)
        is_hierarchical = self.hosts is not False
        return await resolve(self.compression, groups, is_hierarchical=is_hierarchical, key=key, given=given)

    def __str__(self) -> str:
        hosts = "by host" if self.hosts is True else "regardless of hosts"
        return (
            f"{self.compression}, in buckets of {self.minimum_bytes} bytes or more after {self.warm_up_steps} steps, "
            f"{hosts if isinstance(self.hosts, bool) else f'hosts {[list(host) for host in self.hosts]}'}"
        )


_NUMBER = "number"
"""The number of the hook on rank 0."""
_KNOWN = "known"
"""The same on a rank that knows it, else empty."""
_GONE_ON = "gone on"
"""The same on a rank that has completed a step with it, else empty."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """One backward pass; ``number`` is equal on all ranks."""

    number: int
    under_way: int = 0
    is_closed: bool = False
    """Whether its last bucket has begun."""
    is_good: bool = True
    schemes: list[tuple[BucketState, Scheme]] = field(default_factory=list)
    tally: StepTally = field(default_factory=StepTally)


@dataclass(slots=True, kw_only=True)
class _HookGroups:
    """The groups of one hook; ``communicators`` are all those that reduce its gradients."""

    own: Communicator
    sync_groups: SyncGroups
    communicators: tuple[Communicator, ...]

    @classmethod
    def of(cls, over: Communicator, hook: str) -> _HookGroups:
        """Return the groups of all ranks for the hook called ``hook``, the same name on all ranks.  Nothing is sent."""
        name, key = f"the gradient hook of {over.name}", f"gradient hook {hook}"
        own = over.subgroup(range(over.size), name=name, key=key, has_own_timeout=False)
        assert own is not None, "this rank is one of them"
        groups = SyncGroups(everyone=own, replicas=own, partitions={REPLICAS: (range(own.size),)})
        return cls(own=own, sync_groups=groups, communicators=(own,))


class HookReducer:
    """Reduces buckets over the ranks of ``over``.  Create and use it on the event loop of ``over``."""

    def __init__(self, over: Communicator, settings: HookSettings, memory: HookMemory, tally: HookTally) -> None:
        self._over = over
        self._groups: _HookGroups | None = None
        self._number = secrets.token_hex(8)
        self._settings = settings
        self._memory = memory
        self._tally = tally
        self._keys = Keys("gradients")
        self._turns = ThreadTurns(threads=max(1, (os.cpu_count() or 1) // 2))
        self._agreed = asyncio.Event()
        self._agreed.set()
        self._resolved: asyncio.Future[Resolved] | None = None
        self._step = _Step(number=memory.steps, is_closed=True)
        self._has_completed = False
        """Whether a step was completed here."""
        self.is_forgotten = False
        """Whether ranks must agree on all buckets again, from the next step on."""

    @property
    def is_idle(self) -> bool:
        """Whether no bucket is in progress."""
        return self._step.under_way == 0

    @property
    def traffic(self) -> SyncTraffic:
        """All that was sent for gradients."""
        return SyncTraffic.read(() if self._groups is None else self._groups.communicators)

    def begin(self, given: HookBucket) -> Coroutine[Any, Any, None]:
        """Give the bucket its place in the order of operations; awaited, the result replaces the gradients by their
        mean.

        One with a ``refusal`` is agreed on like any other; but then its reduction ends on all ranks.
        """
        step = self._step_of(given)
        state = self._memory.find(given)
        if state is not None:
            return self._reduce_agreed(step, state, given)
        refusal: UsageError | None = None
        try:
            state = self._memory.add(given)
            lines = [str(self._settings), f"step {step.number}", *state.lines()]
        except UsageError as error:
            refusal, lines = error, [f"an error: {error}"]
        offer = {REPLICAS: lines, _NUMBER: [self._number], _KNOWN: [self._number if self._groups else ""]}
        offer[_GONE_ON] = offer[_KNOWN] if self._has_completed else [""]
        exchange = self._over.all_gather_object(offer, wanted=dict[str, list[str]])
        return self._agree_on_bucket(step, given, exchange, state if state is not None else refusal)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _step_of(self, given: HookBucket) -> _Step:
        """Return the step of a bucket that begins."""
        step = self._step
        if given.index == 0:
            if step.under_way:
                raise UsageError(
                    f"gradient_hook: expected the {step.under_way} buckets of the last backward pass to be through, "
                    "but they are under way"
                )
            if self.is_forgotten:
                self._memory.clear()
                self.is_forgotten = False
            self._memory.steps += 1
            step = self._step = _Step(number=self._memory.steps)
        step.under_way += 1
        step.is_closed = given.is_last
        return step

    async def _agree_on_bucket(
        self,
        step: _Step,
        given: HookBucket,
        exchange: Coroutine[Any, Any, Sequence[Lines]],
        state: BucketState | UsageError | None,
    ) -> None:
        """Reduce a new bucket once all ranks have described it equally."""
        try:
            offers = await exchange
            if isinstance(state, UsageError):
                raise state
            difference = find_difference(offers, {REPLICAS: (range(self._over.size),)}, self._over.ranks)
            if difference is None:
                difference = _find_other_hook(offers, self._over.ranks, step.number)
            if difference is not None:
                raise SettingsDiffer(str(difference))
            if self._groups is None:
                (self._number,) = offers[0][_NUMBER]
                self._groups = _HookGroups.of(self._over, self._number)
        except BaseException:
            step.under_way -= 1
            step.is_good = False
            self.is_forgotten = True
            raise
        assert isinstance(state, BucketState), "ranks agree about it"
        await self._reduce_agreed(step, state, given)

    async def _reduce_agreed(self, step: _Step, state: BucketState, given: HookBucket) -> None:
        """Reduce a bucket on which all ranks have agreed."""
        assert self._groups is not None, "the ranks have agreed on it"
        groups, begun = self._groups, time.perf_counter()
        try:
            scheme = await self._scheme(groups, step, state, given)
            steps = self._reduction_steps(step, state, scheme)
            if given.refusal is not None:
                step.is_good = False
                _close(steps, given.refusal)
                return
            with bucket_span(self._over, given.index, given.nbytes, scheme.codec_name):
                times = await self._run_scheme(groups, state, scheme, steps, given)
        except BaseException:
            step.is_good = False
            raise
        finally:
            step.under_way -= 1
        step.schemes.append((state, scheme))
        step.tally.add((begun, time.perf_counter()), times)
        step.tally.compressed += not isinstance(scheme, UncompressedSum)
        step.tally.not_finite += not scheme.is_finite
        step.tally.bytes_uncompressed += least_bytes(given.nbytes, groups.own)
        if step.is_closed and step.is_good and not step.under_way:
            self._end(step)

    def _end(self, step: _Step) -> None:
        """Complete a step whose buckets are all reduced.  A non-finite step leaves error feedback unchanged."""
        self._has_completed = True
        if all(scheme.is_finite for _, scheme in step.schemes):
            for state, scheme in step.schemes:
                scheme.commit()
                if isinstance(scheme, UncompressedSum):
                    self._memory.forget_residuals(state)
        self._tally.add_step(step.tally, self.traffic)

    async def _scheme(self, groups: _HookGroups, step: _Step, state: BucketState, given: HookBucket) -> Scheme:
        """Return the scheme that reduces the bucket in this step; it is the same on all ranks."""
        settings = self._settings
        if groups.own.size > 1 and not settings.is_exact(nbytes=given.nbytes, step=step.number):
            if state.lossy is None:
                resolved = (await self._resolve(groups)).settled(state.bucket.count)
                if resolved.codec != Identity():
                    await self._make_scheme(groups, state, resolved)
            if state.lossy is not None:
                return state.lossy
        return UncompressedSum(state.bucket, groups.own, checks_finite=not settings.is_lossless)

    async def _make_scheme(self, groups: _HookGroups, state: BucketState, resolved: Resolved) -> None:
        """Make the scheme of ``state``.  A rank that fails notifies the others, which would otherwise wait for it."""
        maker = SchemeMaker(
            groups=groups.sync_groups,
            hosts=resolved.hosts,
            codec=resolved.codec,
            has_feedback=self._settings.compression.error_feedback,
            algorithm=None,
            as_views=False,
        )
        failure: Exception | None = None
        try:
            self._memory.settle(state, maker.make(state.bucket))
        except Exception as error:  # noqa: BLE001  # raised below, when the others know
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        key = f"{self._keys.bucket(state.bucket).replicas}/made"
        try:
            texts: list[str] = await groups.own.all_gather_object(text, key=key, wanted=str)
        except BaseException:
            self.is_forgotten = True  # some ranks may have the scheme and others not
            raise
        self.is_forgotten |= any(texts)
        if failure is not None:
            raise failure
        for rank, other in zip(groups.own.ranks, texts, strict=True):
            if other:
                raise PeerCancelled(f"rank {rank} cannot compress {state.bucket}: {other}", rank=rank)

    async def _resolve(self, groups: _HookGroups) -> Resolved:
        """Return the resolved codec; the first bucket that needs it starts the resolution."""
        if self._resolved is not None:
            return await asyncio.shield(self._resolved)
        self._resolved = found = asyncio.get_running_loop().create_future()
        try:
            resolved = await self._settings.resolve(groups.sync_groups, f"{self._keys.prefix}/auto")
        except BaseException:
            self._resolved = None
            found.cancel()
            raise
        groups.communicators = (groups.own, *(() if resolved.hosts is None else resolved.hosts.all))
        found.set_result(resolved)
        return resolved

    def _reduction_steps(self, step: _Step, state: BucketState, scheme: Scheme) -> Sequence[ReductionStep]:
        key = self._keys.bucket(state.bucket).replicas
        return scheme.reduction_steps(key, (step.number, zlib.crc32(state.bucket.shared_name.encode())))

    async def _run_scheme(
        self,
        groups: _HookGroups,
        state: BucketState,
        scheme: Scheme,
        steps: Sequence[ReductionStep],
        given: HookBucket,
    ) -> RunTimes:
        """Take ``steps`` of ``scheme``; if that fails here, its collectives are cancelled on the other ranks too."""
        transfer = BucketTransfer(scheme, given, is_lent=scheme.lend(given.array), ranks=groups.own.size)
        run = BucketRun(scheme=scheme, turns=self._turns, agreed=self._agreed)
        try:
            if isinstance(scheme, UncompressedSum):
                await run.take(steps, before=lambda: transfer.divide(self._memory.waiting(state)))
            else:
                await run.take(steps, before=transfer.read, after=transfer.write)
        except BaseException as error:
            _close(steps, error)
            raise
        return run.times


def _find_other_hook(offers: Sequence[Lines], names: Sequence[int], step: int) -> Difference | None:
    """Return a difference if some rank has a new hook, or another one, where the hook of other ranks goes on.

    In a first step that failed some ranks may have learnt the number of the hook, or completed the step, and others
    not.  No rank completes a step before all know the number.
    """
    numbers = [one[_KNOWN][0] for one in offers]
    goes_on = any(one[_GONE_ON][0] for one in offers)
    first = next((rank for rank, number in enumerate(numbers) if number), 0)
    for rank, number in enumerate(numbers):
        if number != numbers[first] and (number or goes_on):
            expected, got = (
                f"step {step} of {f'hook {one}' if one else 'a new hook'}" for one in (numbers[first], number)
            )
            return Difference(first=names[first], rank=names[rank], expected=expected, got=got)
    return None


def _close(steps: Sequence[ReductionStep], error: BaseException) -> None:
    """End the collectives that have not begun on the other ranks, which get ``error`` as the reason."""
    with cancel_reason() as why:
        why.take(error)
        for reduction in steps:
            reduction.close()
