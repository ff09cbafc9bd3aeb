"""The synchronizer: keeps plan, buffers, residuals and statistics between steps."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from asyncpar.codecs import Identity, Int8, Values
from asyncpar.collectives.communicator import Communicator
from asyncpar.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync import phases
from asyncpar.gradsync.agreement import Agreement, Disagreement, digest_of
from asyncpar.gradsync.buffers import BucketBuffers
from asyncpar.gradsync.config import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.gradsync.flow import BucketFlow, ThreadTurns
from asyncpar.gradsync.phases import HasGradient
from asyncpar.gradsync.plan import Bucket, BucketPlan, GradientSpec, plan_buckets
from asyncpar.gradsync.statistics import SyncStatistics
from asyncpar.gradsync.step import SyncStep


class ModelShards(Protocol):
    """Anything that lists its parameters in registration order, such as ``nn.Stage``."""

    def parameters(self) -> Iterable[HasGradient]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The buckets in force: their plan, their description for other ranks, and, unless alone, their memory."""

    plan: BucketPlan
    lines: tuple[str, ...]
    buffers: tuple[BucketBuffers, ...]


class GradientSynchronizer:
    """Makes the gradients of all replicas equal to their mean.

    ``communicator`` joins the data-parallel replicas; ``name`` tells apart synchronizers that share one.  All ranks run
    the same steps in the same order.  In this version ``tp_size`` and ``pp_size`` must be 1.
    """

    def __init__(
        self,
        config: ThreeDParallelismConfig,
        rank_mapping: RankMapping,
        *,
        communicator: Communicator,
        bucketing: GradientBucketingConfig | None = None,
        compression: GradientCompressionConfig | None = None,
        name: str = "gradients",
    ) -> None:
        _check_place(config, rank_mapping, communicator)
        self._communicator = communicator
        self._bucketing = bucketing or GradientBucketingConfig()
        self._compression = compression or GradientCompressionConfig()
        self._algorithm = _ALGORITHMS[config.comm_strategy]
        self._name = name
        self._is_stepping = False
        self._layout: _Layout | None = None
        self._disagreements = 0
        self._residuals: dict[str, Values] = {}
        self._statistics = SyncStatistics()

    async def synchronize_gradients(self, model_shards: ModelShards) -> None:
        """Replace every gradient by its mean over all replicas.  See ``step``."""
        async with self.step(model_shards.parameters()):
            pass

    @asynccontextmanager
    async def step(self, parameters: Iterable[HasGradient]) -> AsyncIterator[SyncStep]:
        """Synchronize while gradients are still being computed.

        Inside the block, call ``ready(name)`` for each gradient that is final; leaving it means that all are, and waits
        for the last bucket.  Then, and only then, all gradients are replaced by their mean: whatever goes wrong before,
        on any rank, raises on every rank and leaves gradients and residuals as they were.  When a bucket fails, the
        block is cancelled at once; a worker thread that computes in it goes on to its end, unheard.

        Raises ``UsageError`` when ranks differ in their parameters or settings, ``NonFiniteValue`` on every rank when
        a gradient is NaN or infinite on any, and ``PeerError``.
        """
        if self._is_stepping:
            raise UsageError("step: the previous step of this synchronizer is still under way")
        self._is_stepping = True
        try:
            by_name = _by_name(parameters)
            layout = self._prepare(by_name)
            step = SyncStep(layout.plan, overlap=self._bucketing.overlap_communication)
            sent_before = self._communicator.traffic.payload_bytes
            agreement, flows = self._make_flows(layout, by_name)
            try:
                with _first_error():
                    async with asyncio.TaskGroup() as tasks:
                        if self._communicator.size > 1:
                            tasks.create_task(agreement.run(), name=f"{self._name}/agreement")
                        for flow in flows:
                            tasks.create_task(step.carry(flow), name=flow.key)
                        yield step
                        step.finish()
            except Disagreement:
                self._layout, self._disagreements = None, self._disagreements + 1
                step.close()
                raise
            except BaseException:
                step.close()
                if self._communicator.size > 1:
                    await agreement.give_up()
                for flow in flows:
                    await flow.give_up()
                raise
            self._count_bytes(step, layout, sent_before=sent_before)
            self._commit(step, layout, by_name)
        finally:
            self._is_stepping = False

    def get_sync_stats(self) -> SyncStatistics:
        """Return a copy of the statistics so far."""
        return dataclasses.replace(self._statistics)

    def update_compression_config(self, compression: GradientCompressionConfig) -> None:
        """Use ``compression`` from the next step on; to be called on all ranks.

        Residuals are kept if the new setting uses error feedback, else dropped.
        """
        self._check_idle("update_compression_config")
        self._residuals = self.residuals()
        self._compression = compression
        self._layout = None

    def clear_buffers(self) -> None:
        """Free all buffers and forget the residuals; the next step makes new ones.  To be called on all ranks."""
        self._check_idle("clear_buffers")
        self._layout, self._residuals = None, {}

    def residuals(self) -> dict[str, Values]:
        """Return a copy of each parameter's residual, flat, by name; empty without error feedback."""
        if self._layout is None:
            return dict(self._residuals)
        every = (pair for buffers in self._layout.buffers for pair in buffers.residuals())
        return {name: residual.copy() for name, residual in every}

    def restore_residuals(self, residuals: Mapping[str, Values]) -> None:
        """Go on with ``residuals`` of an earlier run of this rank; to be called on all ranks, before a step."""
        self._check_idle("restore_residuals")
        self._residuals = {name: np.array(residual, np.float32).reshape(-1) for name, residual in residuals.items()}
        self._layout = None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _prepare(self, by_name: Mapping[str, HasGradient]) -> _Layout:
        """Return the layout for these gradients; if they are new, plan it and allocate its buffers."""
        specs = tuple(_spec_of(parameter) for parameter in by_name.values())
        if self._layout is not None and self._layout.plan.specs == specs:
            return self._layout
        plan = plan_buckets(
            specs,
            bucket_bytes=int(self._bucketing.bucket_size_mb * (1 << 20)),
            max_buckets=self._bucketing.max_buckets,
        )
        residuals = self.residuals()
        self._layout, self._residuals = None, residuals  # its memory can be used for the new one
        self._layout = _Layout(
            plan=plan,
            lines=(repr(self._bucketing), repr(self._compression), *map(str, specs)),
            buffers=tuple(map(self._make_buffers, plan.buckets)) if self._communicator.size > 1 else (),
        )
        self._residuals = {}
        for buffers in self._layout.buffers:
            for name, residual in buffers.residuals():
                if name in residuals and residuals[name].size == residual.size:
                    residual[:] = residuals[name]
        return self._layout

    def _make_buffers(self, bucket: Bucket) -> BucketBuffers:
        is_lossy = self._compression.enable_compression
        return BucketBuffers(
            bucket,
            size=self._communicator.size,
            codec=Int8() if is_lossy else Identity(),
            has_feedback=is_lossy and self._compression.error_feedback,
            empty=self._communicator.empty,
        )

    def _make_flows(self, layout: _Layout, by_name: Mapping[str, HasGradient]) -> tuple[Agreement, list[BucketFlow]]:
        """Return what has to run in a step; no flows when there is nothing to synchronize.

        Buckets of different layouts never meet: their keys differ.  Keys begin anew after a disagreement, as ranks had
        used different ones in it.
        """
        prefix = f"{self._name}/{self._disagreements}"
        turns = ThreadTurns(threads=max(1, (os.cpu_count() or 1) // 2))
        agreement = Agreement(self._communicator, layout.lines, key=f"{prefix}/agreement")
        flows = [
            BucketFlow(
                buffers=buffers,
                parameters=by_name,
                communicator=self._communicator,
                key=f"{prefix}/{digest_of(layout.lines).hex()}/bucket/{buffers.bucket.index}",
                turns=turns,
                algorithm=self._algorithm,
            )
            for buffers in layout.buffers
        ]
        return agreement, flows

    def _commit(self, step: SyncStep, layout: _Layout, by_name: Mapping[str, HasGradient]) -> None:
        """Write back: nothing can fail from here on."""
        squares = 0.0
        for buffers in layout.buffers:
            factor = 1.0 if buffers.codec.is_summable else 1.0 / self._communicator.size
            phases.unpack(buffers, by_name, factor=factor)
            buffers.keep_lost()
            squares += buffers.residual_square
        step.record.add_to(
            self._statistics, lane_bandwidth=self._communicator.bandwidth, residual_norm=math.sqrt(squares)
        )

    def _count_bytes(self, step: SyncStep, layout: _Layout, *, sent_before: int) -> None:
        """Record what the communicator sent in this step, and what it would have sent without a codec."""
        sent, size = self._communicator.traffic.payload_bytes - sent_before, self._communicator.size
        step.record.bytes_on_wire = sent
        is_lossy = self._compression.enable_compression
        step.record.bytes_uncompressed = 2 * (size - 1) * layout.plan.nbytes // size if is_lossy else sent

    def _check_idle(self, what: str) -> None:
        if self._is_stepping:
            raise UsageError(f"{what}: a step is under way")


_ALGORITHMS: Mapping[CommunicationStrategy, str | None] = MappingProxyType(
    {
        CommunicationStrategy.ALL_REDUCE: None,
        CommunicationStrategy.ADAPTIVE: None,
        CommunicationStrategy.RING_ALL_REDUCE: "ring",
        CommunicationStrategy.TREE_ALL_REDUCE: "tree",
        CommunicationStrategy.HIERARCHICAL_ALL_REDUCE: "hierarchical",
    }
)


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise the cause out of a task group's exceptions: that of this rank rather than a peer's cancelling."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = sorted(group.exceptions, key=lambda error: isinstance(error, PeerCancelled))
        raise errors[0] from errors[0].__cause__


def _check_place(config: ThreeDParallelismConfig, mapping: RankMapping, communicator: Communicator) -> None:
    if config.tp_size != 1 or config.pp_size != 1:
        raise UsageError(
            "config: gradient synchronization is data parallel only in this version, expected tp_size = pp_size = 1, "
            f"got tp_size = {config.tp_size}, pp_size = {config.pp_size}"
        )
    if communicator.size != config.dp_size:
        raise UsageError(f"communicator: expected {config.dp_size} ranks (dp_size), got {communicator.size}")
    if communicator.rank != mapping.dp_rank:
        raise UsageError(
            f"rank_mapping: expected dp_rank {communicator.rank} (the communicator's rank), got {mapping.dp_rank}"
        )


def _by_name(parameters: Iterable[HasGradient]) -> dict[str, HasGradient]:
    """Return parameters by name, in registration order."""
    by_name: dict[str, HasGradient] = {}
    for parameter in parameters:
        if parameter.name in by_name:
            raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
        by_name[parameter.name] = parameter
    return by_name


def _spec_of(parameter: HasGradient) -> GradientSpec:
    return GradientSpec(name=parameter.name, shape=parameter.grad.shape, dtype=parameter.grad.dtype)
