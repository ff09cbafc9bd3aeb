"""The synchronous mode: gradients are averaged in rounds, including ranks that have run out of inputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import numpy as np

from asyncpar.agreement.exchanges import Ballot
from asyncpar.collectives.call import Abandoned
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer, NonFinitePolicy
from asyncpar.parallel.config import DDPConfig
from asyncpar.parallel.gradients import scale
from asyncpar.parallel.module import OnGradient, Trainable
from asyncpar.parallel.replicas import broadcast
from asyncpar.parallel.rounds import GradientRounds, LocalGradients


class Joining:
    """The roll-call of one ``join`` block.

    Before each round all ranks announce whether they have inputs of their own (are *active*); the others take part as
    shadows, with zeros, until no rank is active.  ``wants_parameters``: this rank, as a shadow, does not update its
    parameters, and so needs those of a rank that was active to the end.
    """

    def __init__(self, communicator: Communicator, *, key: str, by_initial_size: bool, wants_parameters: bool) -> None:
        self._communicator = communicator
        self._key = key
        self._by_initial_size = by_initial_size
        self._wants_parameters = wants_parameters
        self._active: tuple[int, ...] = ()
        self.is_broken = False
        """Whether a round has failed, so that all ranks know that this one will not continue."""
        self.root: int | None = None
        """A rank that was active in the last round; None when there was none, or no rank needs to know."""

    async def exchange_activity(self, *, is_active: bool) -> bool:
        """Announce whether this rank is active, and return whether any is.  Every rank has to call it."""
        size = self._communicator.size
        answers = np.zeros(size + 1, np.bool_)
        answers[self._communicator.rank] = is_active
        answers[size] = self._wants_parameters
        try:
            answers = await self._ballot().cast(answers)
        except (AsyncparError, TimeoutError):
            self.is_broken = True
            raise
        self._active = tuple(np.flatnonzero(answers[:size]).tolist())
        if self._active:
            self.root = self._active[0] if answers[size] else None
        return bool(self._active)

    def factor(self) -> float:
        """Return the factor from the mean over all ranks to that over the ranks of the divisor."""
        return 1.0 if self._by_initial_size else self._communicator.size / len(self._active)

    def close(self) -> None:
        """Abort the next roll-call on all ranks, unless a failed round has notified them already.  Does not wait."""
        if not self.is_broken:
            self._ballot().close()

    def _ballot(self) -> Ballot:
        return Ballot(self._communicator, count=self._communicator.size + 1, key=self._key)


T = TypeVar("T")

_FAREWELL_SECONDS = 1.0


class GradientAveraging:
    """Rounds of the ranks of ``communicator``, and the blocks in which they may have uneven inputs."""

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[Trainable],
        config: DDPConfig,
        *,
        bucket_size: int,
        compression: GradientCompressionConfig,
        when_not_finite: NonFinitePolicy,
        name: str,
    ) -> None:
        self._communicator = communicator
        self._parameters = tuple(parameters)
        self._config = config
        self._compression = compression
        self._when_not_finite = when_not_finite
        self._name = name
        self._joining: Joining | None = None
        self._joins = 0
        self._has_failed = False
        """Whether the last round has failed, so that all ranks know."""
        self.bucket_size = _check_bucket_size(bucket_size)
        self.synchronizer = self._make_synchronizer()
        self.rounds = GradientRounds(communicator, self.synchronizer, self._parameters, config, key=name)

    def set_bucket_size(self, nbytes: int) -> None:
        """Use buckets of ``nbytes`` from the next round on."""
        self.bucket_size = _check_bucket_size(nbytes)
        self.synchronizer.update_bucketing_config(self._bucketing())

    async def run(
        self, local: LocalGradients, compute: Callable[[OnGradient | None], Awaitable[T]], worker: WorkerThread
    ) -> T:
        """Compute and average; see ``GradientRounds.run``.  ``compute`` gets None when communication is delayed."""
        if self._joining is not None:
            await self._joining.exchange_activity(is_active=True)
        result = await self._run_round(
            local, lambda ready: compute(None if self._config.delay_all_reduce else ready), worker
        )
        local.reset()
        return result

    async def average_pending(self, local: LocalGradients, worker: WorkerThread) -> None:
        """Average the gradients that passes have added up without a round, unless no rank has any; all ranks call it.

        Raises ``UsageError``, on every rank, if some have any and others have none.
        """
        ballot = Ballot(self._communicator, count=2, key=f"{self._name}/pending")
        is_pending = local.passes > 0
        some_have, some_have_not = await ballot.cast(np.array([is_pending, not is_pending], np.bool_))
        if some_have and some_have_not:
            have = "has" if is_pending else "has no"
            raise UsageError(
                "sync_gradients: expected backward passes that were not averaged yet on all ranks or on none, "
                f"but this rank {have} such passes, and others differ"
            )
        if some_have:
            await self.run(local, lambda _: worker.run(local.finish), worker)

    async def abandon(self, cause: BaseException) -> None:
        """Abort the next round on all ranks, which receive ``cause`` as the reason.  Waits a bounded time."""
        if self._has_failed or self._communicator.size == 1:
            return
        nothing = LocalGradients(self._parameters, must_reach_all=False)

        async def fail(_ready: OnGradient) -> None:
            raise Abandoned(cause)

        with suppress(Abandoned, TimeoutError, AsyncparError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self.rounds.run(nothing, fail)

    @asynccontextmanager
    async def join(
        self,
        local: LocalGradients,
        worker: WorkerThread,
        *,
        by_initial_size: bool,
        on_shadow: Callable[[], None] | None,
    ) -> AsyncIterator[None]:
        """See ``DistributedDataParallel.join``."""
        if self._joining is not None:
            raise UsageError("join: this rank is in such a block already")
        self._joins += 1
        joining = self._joining = Joining(
            self._communicator,
            key=f"{self._name}/join/{self._joins}",
            by_initial_size=by_initial_size,
            wants_parameters=on_shadow is None,
        )
        try:
            yield
            if local.passes:
                raise UsageError(f"join: {local.passes} backward passes under no_sync were never averaged")
            while await joining.exchange_activity(is_active=False):
                await self._shadow(worker, on_shadow)
        except BaseException:
            joining.close()
            raise
        finally:
            self._joining = None
        if joining.root is not None:
            key = f"{self._name}/joined/{self._joins}"
            await broadcast(self._parameters, self._communicator, root=joining.root, key=key)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _run_round(
        self,
        local: LocalGradients,
        compute: Callable[[OnGradient], Awaitable[T]],
        worker: WorkerThread,
        *,
        is_shadow: bool = False,
    ) -> T:
        try:
            result = await self.rounds.run(local, compute, is_shadow=is_shadow)
            self._has_failed = False
        except BaseException:
            self._has_failed = True
            if self._joining is not None:
                self._joining.is_broken = True
            raise
        factor = 1.0 if self._joining is None or self.rounds.outcome.is_skipped else self._joining.factor()
        if factor != 1.0:
            await worker.run(self._scale, factor)
        return result

    async def _shadow(self, worker: WorkerThread, on_shadow: Callable[[], None] | None) -> None:
        """Take part in a round of others."""
        nothing = LocalGradients(self._parameters, must_reach_all=False)
        await self._run_round(nothing, _compute_nothing, worker, is_shadow=True)
        if on_shadow is not None:
            await worker.run(on_shadow)

    def _scale(self, factor: float) -> None:
        """Multiply the means, but not gradients that were left alone."""
        for parameter in self._parameters:
            if parameter.name not in self.rounds.unused:
                scale(parameter.grad, factor)

    def _make_synchronizer(self) -> GradientSynchronizer:
        return GradientSynchronizer.data_parallel(
            self._communicator,
            bucketing=self._bucketing(),
            compression=self._compression,
            when_not_finite=self._when_not_finite,
            name=f"{self._name}/gradients",
        )

    def _bucketing(self) -> GradientBucketingConfig:
        return GradientBucketingConfig(
            bucket_size_mb=self.bucket_size / (1 << 20),
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
        )


async def _compute_nothing(_ready: OnGradient) -> None:
    """Compute nothing, as a shadow does."""


def _check_bucket_size(nbytes: object) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise UsageError(f"bucket_size: expected a positive number of bytes, got {nbytes!r}")
    return nbytes
