"""Data parallelism over ranks: a replica on each, all trained together."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from asyncpar.backends import CommunicationGroup, CommunicationRuntime
from asyncpar.collectives.communicator import Communicator, refuse_elastic
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import UsageError
from asyncpar.gradsync import (
    GradientCompressionConfig,
    GradientSynchronizer,
    NonFinitePolicy,
    StepOutcome,
    SyncStatistics,
)
from asyncpar.parallel.averaging import GradientAveraging
from asyncpar.parallel.checked_model import CheckedModel
from asyncpar.parallel.config import BUCKET_BYTES, DDP_GROUP, DDPConfig, SynchronizationMode, check_free, unused_setting
from asyncpar.parallel.gossip import UpdateGossip
from asyncpar.parallel.module import (
    Array,
    Model,
    Trainable,
    buffers_of,
    check_device,
    check_is_training,
    in_stream_of,
    set_training,
)
from asyncpar.parallel.replicas import is_on_device, make_equal
from asyncpar.parallel.rounds import LocalGradients

T = TypeVar("T")


class DistributedDataParallel:
    """One rank's replica of ``model``, kept equal to those of all ranks of ``process_group``.

    A training step is the same in every mode::

        async with DistributedDataParallel.on(node.world, model) as ddp:
            optimizer = Optimizer(ddp.parameters(), AdamW())
            for x in batches:
                ddp.zero_grad()
                y, saved = await ddp.forward(x)
                await ddp.backward(saved, loss_gradient(y))
                await ddp.update(lambda: optimizer.step(rate))

    ``model`` is a stage of ``asyncpar.nn``, or a user-defined one with the methods of ``Model`` or ``Module``, which
    are checked.

    Synchronous: after ``backward`` gradients are the mean over ranks, with the same bits on all of them, and ``update``
    only calls the optimizer.  Otherwise gradients are this rank's own, ``update`` exchanges the changes made by the
    optimizer, and leaving the block waits until all ranks have all updates and the same parameters.  The loss is that
    of this rank's rows, so the mean over ranks is that of the whole batch if all have equally many.

    Parameters may be on this rank's CUDA device (synchronous mode): buckets have separate streams there, which wait for
    the streams that compute gradients, and vice versa; see ``docs/devices.md``.  Buffers of the model, if it has
    ``buffers()``, begin with the values of rank 0, too.

    Forward and backward passes and updates run in a thread named after ``device``, while the loop moves data.  Entering
    the block (or ``start``) checks that all ranks have the same parameters in the same order, and the same settings;
    otherwise every rank raises ``UsageError`` naming the first difference and its rank.  Then all take the values of
    rank 0.  An error on one rank raises on all; after an error in ``backward`` gradients are incomplete, and parameters
    unchanged.

    In the other modes updates are sent whole and unencoded, so ``compression``, ``bucket_size``, ``when_not_finite``,
    ``static_graph`` and ``gradient_as_bucket_view`` are refused there; ``delay_all_reduce`` has no effect, since there
    is no all-reduce, and updates are sent while others are computed.

    Without ``config`` gradients are sent while others are computed (``delay_all_reduce=False``), if ``backward``
    reports which are final; for a model whose ``backward`` takes no ``on_gradient`` this is logged once.

    ``name`` distinguishes replicas of several models in one group: it belongs to one running replica at a time.

    With ``owns_runtime`` closing it finalizes ``runtime``.
    """

    def __init__(
        self,
        model: Model,
        device: str,
        process_group: str | CommunicationGroup,
        runtime: CommunicationRuntime,
        config: DDPConfig | None = None,
        *,
        mode: SynchronizationMode = SynchronizationMode.SYNCHRONOUS,
        bucket_size: int = BUCKET_BYTES,
        compression: GradientCompressionConfig | None = None,
        when_not_finite: NonFinitePolicy = NonFinitePolicy.ABORT,
        name: str = "ddp",
        owns_runtime: bool = False,
    ) -> None:
        self.device = check_device(device)
        config = config or DDPConfig(delay_all_reduce=False)
        compression = compression or GradientCompressionConfig()
        if not mode.is_synchronous:
            check_free(mode, config, bucket_size, compression, when_not_finite)
        self.mode = mode
        self.runtime = runtime
        self._owns_runtime = owns_runtime
        self.config = config
        self._model = CheckedModel(model)
        self._group = runtime.get_group(process_group)
        refuse_elastic(self._group.communicator, type(self).__name__)
        self._name = name
        self._is_training = True
        self._is_local = False
        self._worker: WorkerThread | None = None
        self._local = LocalGradients(
            self._model.parameters(),
            must_reach_all=not (self.config.find_unused_parameters or self.config.static_graph),
            sums=self.config.no_sync_weight == "sum",
        )
        self._make_averaging = partial(
            GradientAveraging,
            self._group.communicator,
            self._model.parameters(),
            self.config,
            compression=compression,
            when_not_finite=when_not_finite,
        )
        not_started = f"{name}/{secrets.token_hex(8)}"  # ``start`` makes one with a name common to all ranks
        self._averaging = self._make_averaging(bucket_size=bucket_size, name=not_started)
        self._gossip: UpdateGossip | None = None

    @classmethod
    def on(
        cls,
        communicator: Communicator,
        model: Model,
        *,
        device: str = "cpu:0",
        config: DDPConfig | None = None,
        mode: SynchronizationMode = SynchronizationMode.SYNCHRONOUS,
        bucket_size: int = BUCKET_BYTES,
        compression: GradientCompressionConfig | None = None,
        when_not_finite: NonFinitePolicy = NonFinitePolicy.ABORT,
        name: str = "ddp",
    ) -> Self:
        """Return this rank's replica of ``model`` in ``communicator``, such as ``node.world``, to be entered.

        All ranks of ``communicator`` create one.  ``mode`` and everything else is as for the constructor, without a
        process group to set up first.  Raises ``UsageError`` for a model without the required methods, showing them.
        """
        return cls(
            model,
            device,
            DDP_GROUP,
            CommunicationRuntime.on(communicator, group=DDP_GROUP),
            config,
            mode=mode,
            bucket_size=bucket_size,
            compression=compression,
            when_not_finite=when_not_finite,
            name=name,
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Check and equalize the replicas.  A second call does nothing.

        All ranks start; the first ones wait for the others.
        """
        if self._worker is not None:
            return self
        communicator = self._group.communicator
        communicator.claim(self._name, self)
        settings = (str(self.mode), repr(self.config), f"bucket size {self.bucket_size}")
        try:
            word = await make_equal(
                self._model.parameters(),
                settings,
                communicator,
                key=f"{self._name}/start",
                buffers=buffers_of(self._model.model),
            )
            if is_on_device(self._model.parameters()) and not self.mode.is_synchronous:
                raise UsageError(f"mode: expected synchronous with parameters on devices, got {self.mode}")
        except BaseException:
            communicator.release(self._name, self)
            raise
        self._averaging = self._make_averaging(bucket_size=self.bucket_size, name=f"{self._name}/{word}")
        if not self.mode.is_synchronous:
            gossip = UpdateGossip(self._model.parameters(), communicator, self.mode, key=f"{self._name}/{word}/updates")
            await gossip.start()
            self._gossip = gossip
        self._worker = WorkerThread(f"compute {self.device}")
        overlaps = self.mode.is_synchronous and not self.config.delay_all_reduce
        if overlaps and communicator.size > 1 and communicator.rank == 0:
            self._model.warn_if_late()
        return self

    async def close(self, *, failed: bool = False, cause: BaseException | None = None) -> None:
        """Stop thread and tasks without waiting for other ranks.  With ``failed`` the others get an error.

        ``cause`` is its reason, by default the exception that is being handled.  A replica that owns its runtime
        finalizes it.
        """
        if self._gossip is not None:
            await self._gossip.close(failed=failed)
            self._gossip = None
        elif failed and self._worker is not None:
            await self._averaging.abandon(cause or sys.exception() or UsageError("the replica was closed as failed"))
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self._averaging.synchronizer.close()  # buckets on devices need not wait for garbage collection
        self._group.communicator.release(self._name, self)
        if self._owns_runtime:
            await self.runtime.finalize()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            await self.close(failed=True, cause=error)
            return
        try:
            await self.settle()
        except BaseException as unsettled:
            await self.close(failed=True, cause=unsettled)
            raise
        await self.close()

    # -- rank ----------------------------------------------------------------------------------------------------------

    def process_group(self) -> CommunicationGroup:
        """Return the group of all replicas; it is equal to its name."""
        return self._group

    def rank(self) -> int:
        """Return this replica's number in the group."""
        return self._group.rank

    def local_rank(self) -> int:
        """Return this process's number on its host, according to the launcher."""
        return self._group.communicator.local_rank

    def world_size(self) -> int:
        """Return the number of replicas."""
        return self._group.size

    @property
    def bucket_size(self) -> int:
        """The most bytes of gradients that are sent together."""
        return self._averaging.bucket_size

    def set_bucket_size(self, nbytes: int) -> None:
        """Use buckets of ``nbytes`` from the next step on; to be called on all ranks.

        Raises ``UsageError`` for an invalid size, and unless synchronous.
        """
        if not self.mode.is_synchronous:
            raise unused_setting("bucket_size", self.mode, nbytes)
        self._averaging.set_bucket_size(nbytes)

    @property
    def synchronizer(self) -> GradientSynchronizer:
        """The synchronizer of gradients, for its state or another codec.  ``start`` makes a new one."""
        return self._averaging.synchronizer

    def get_sync_stats(self) -> SyncStatistics:
        """Return the figures of gradient synchronization so far."""
        return self.synchronizer.get_sync_stats()

    def outcome(self) -> StepOutcome:
        """Return the outcome of the last round; after a skipped one gradients are not averaged."""
        return self._averaging.rounds.outcome

    def unused_parameters(self) -> tuple[str, ...]:
        """Return the parameters that no rank reached in the last round, whose gradients were left alone."""
        return self._averaging.rounds.unused

    def staleness(self) -> int:
        """Return how many updates this rank is known to be ahead of the slowest; 0 when synchronous."""
        return 0 if self._gossip is None else self._gossip.staleness()

    def waited(self) -> float:
        """Return the seconds for which this rank has waited for slower ones because of bounded staleness."""
        return 0.0 if self._gossip is None else self._gossip.waited()

    # -- the model ---------------------------------------------------------------------------------------------------

    def parameters(self) -> Sequence[Trainable]:
        """Return the model's parameters."""
        return self._model.parameters()

    def zero_grad(self) -> None:
        """Forget all gradients, including those of micro-steps that were not averaged yet."""
        self._model.zero_grad()
        self._local.reset()

    def set_training(self, training: bool) -> None:
        """Set whether the model is trained: in evaluation there is no backward pass, and nothing is sent."""
        self._is_training = training
        set_training(self._model.model, training)

    async def forward(self, x: Any) -> tuple[Array, Any]:
        """Return the output and the state for ``backward``.

        Unless synchronous, the first forward pass of a training step applies the updates of others that have arrived,
        and before that waits for slower ranks if the mode requires it.
        """
        worker = self._running()
        if self._gossip is not None and self._is_training:
            await self._gossip.begin_step(worker)
        return await worker.run(self._model.forward, x)

    async def backward(self, saved: Any, dy: Array) -> Array | None:
        """Compute gradients, and average them over ranks when synchronous; return that of the input.

        Raises ``NonFiniteValue`` if a mean is not finite, and ``PeerError``, on every rank, if one is gone or has
        failed.
        """
        worker = self._running()
        check_is_training(self._is_training)
        run_pass = partial(self._local.run_pass, self._model, saved, dy)
        if self._is_local:
            return await worker.run(partial(run_pass, is_last=False))
        if self._gossip is None:
            return await self._averaging.run(
                self._local, lambda ready: worker.run(partial(run_pass, is_last=True, ready=ready)), worker
            )
        dx = await worker.run(partial(run_pass, is_last=True))
        self._local.reset()
        return dx

    async def sync_gradients(self) -> None:
        """Average the gradients added up under ``no_sync`` over ranks, as the next pass outside of it does.

        All ranks call it.  It does nothing if there are no such gradients, in evaluation, and unless synchronous: other
        passes are averaged as they run, and the other modes exchange updates.  Raises ``UsageError``, on every rank, if
        only some have such passes.
        """
        worker = self._running()
        if self._is_training and self._gossip is None:
            await self._averaging.average_pending(self._local, worker)

    async def update(self, step: Callable[[], T]) -> T:
        """Run ``step``, which changes the parameters, and return its result.

        Unless synchronous, the change is weighted by 1 / ranks and sent to all others.  Raises ``NonFiniteValue``, with
        the parameters unchanged, for a change that is not finite.
        """
        worker, step = self._running(), partial(in_stream_of, self._model.model, step)
        return await (worker.run(step) if self._gossip is None else self._gossip.update(step, worker))

    async def settle(self) -> None:
        """Wait until all ranks have all updates and parameters are equal to the last bit; all ranks call it.

        They may have made different numbers of updates.  When synchronous, this does nothing.
        """
        if self._gossip is not None:
            await self._gossip.settle(self._running())

    # -- exceptions from the rule ------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward passes in the block only add up gradients on this rank.

        The next one outside of it averages over all of them: each of k micro-steps has weight 1 / k.  torch's
        ``no_sync`` leaves their sum, as ``DDPConfig(no_sync_weight="sum")`` does.
        """
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    @asynccontextmanager
    async def join(
        self, *, divide_by_initial_world_size: bool = False, on_shadow: Callable[[], None] | None = None
    ) -> AsyncIterator[None]:
        """Allow ranks to run different numbers of steps in the block; all ranks enter it.

        Leaving it, a rank that has run out takes part in the others' rounds until all have run out, contributing
        nothing: gradients are the mean over the ranks that still have inputs, or, with
        ``divide_by_initial_world_size``, their sum over the number of all.  After each such round ``on_shadow`` is
        called in the compute thread, with the mean in the gradients: pass a function that updates the parameters to
        keep optimizers equal, too.  If any rank has none, all get the parameters of one that was active in the last
        round.

        Unless synchronous it does what ``settle`` does, and ``divide_by_initial_world_size`` is refused.  A rank that
        fails in the block ends it on all ranks.
        """
        if self._gossip is not None:
            if divide_by_initial_world_size:
                raise unused_setting("divide_by_initial_world_size", self.mode, True)
            yield
            await self.settle()
            return
        async with self._averaging.join(
            self._local,
            self._running(),
            by_initial_size=divide_by_initial_world_size,
            on_shadow=None if on_shadow is None else partial(in_stream_of, self._model.model, on_shadow),
        ):
            yield

    # -- inside ------------------------------------------------------------------------------------------------------

    def _running(self) -> WorkerThread:
        if self._worker is None:
            raise UsageError("ddp: it is not running; use `async with`, or await start() first")
        return self._worker
