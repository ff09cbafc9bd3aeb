"""The flow of gradients of micro-steps over a multi-node world: reduced inside nodes, then between them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import ALL, Comparison
from asyncpar.collectives.call import Abandoned, cancel_reason
from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.placement import is_frozen
from asyncpar.errors import AsyncparError, NonFiniteValue, UsageError
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    HostGroups,
    SyncStatistics,
)
from asyncpar.gradsync.layout import frozen_line
from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.gradient_buffer import GradientIntake
from asyncpar.multinode.node_sum import NodeSums, TimedSums
from asyncpar.multinode.statistics import CompressionInfo, LeaderTraffic, MemorySavings, ShardedTimes, savings_of
from asyncpar.nn import Stage
from asyncpar.nn.optimizers import Rule, clip_factor
from asyncpar.nn.parameter import OnGradient
from asyncpar.zero.engine import ZeroEngine
from asyncpar.zero.flow import GradientFlow, ReplicatedFlow
from asyncpar.zero.partition import without_frozen
from asyncpar.zero.row_sum import ReplicaSums, RowSums
from asyncpar.zero.sharded_flow import ShardedFlow

BETWEEN_NODES: Final = "int8"
"""The codec of compressed gradients."""

_FAREWELL_SECONDS = 1.0
"""Others may be gone."""

_UNLIMITED = 1 << 16
"""Limit on the number of buckets, which is determined by their requested size alone."""


class NodeFlow:
    """Takes the gradients of ``intake`` through ``flow``, its ``inner`` flow.

    All ranks call ``run``, then ``apply``, then ``step``.  In ``run`` ranks compare their numbers of micro-steps, the
    previous step, and their frozen parameters.  ``engine`` is that of a sharded flow, whose ``times`` are counted here.
    """

    def __init__(
        self,
        flow: GradientFlow,
        intake: GradientIntake,
        config: MultiNodeConfig,
        groups: HostGroups,
        *,
        name: str,
        engine: ZeroEngine | None = None,
        times: ShardedTimes | None = None,
    ) -> None:
        self.inner = flow
        self._intake = intake
        self._groups = groups
        self._engine = engine
        self._times = times
        self._traffic = LeaderTraffic(groups, is_compressed=config.compresses_between_nodes)
        self._weight = 1 if config.zero_config.average else groups.world.size
        self._nbytes = sum(parameter.size * parameter.dtype.itemsize for parameter in flow.parameters)
        self._key = f"{name}/micro_steps"
        self._runs = 0
        self._last = "no step"
        self._is_broken = False

    @asynccontextmanager
    async def run(self) -> AsyncIterator[OnGradient]:
        """Make the sums of the intake the mean over all ranks; yield the callback for final gradients.

        Leaving the block means that all are final.  An error on any rank raises on every rank.  Different numbers of
        micro-steps, or none, raise ``UsageError`` on every rank.
        """
        intake, difference = self._intake, None
        count, comparison = intake.micro_steps, self._compare()
        try:
            await self.resume()
            self._traffic.begin()
            if self._times is not None:
                self._times.begin()
            async with self.inner.reducing() as ready:
                yield ready if self._engine is None else partial(self._report, ready)
                self._complete()
                try:
                    await comparison.run()
                except SettingsDiffer as error:  # known to all ranks, which end the step in progress, and then raise it
                    if self._engine is not None:  # their buckets may differ, too
                        raise
                    difference = error
        except BaseException:
            await self._break("synchronization")
            comparison.close()
            raise
        self._count_traffic()
        if difference is not None:
            raise difference
        if not count:
            raise UsageError("synchronize_gradients: expected gradients of at least one micro-step, got none")

    async def apply(self) -> None:
        """Divide the means by the number of micro-steps, and drop the intake's copies."""
        intake = self._intake
        if self.inner.is_sharded:
            self.inner.scale(1.0 if intake.gives_means else 1.0 / intake.micro_steps)
            intake.clear()
        else:
            hand_over = partial(intake.hand_over, intake.micro_steps, weight=self._weight)
            await off_loop(hand_over, nbytes=intake.buffer.nbytes)

    async def step(self, learning_rate: float, *, clip_norm: float | None) -> float:
        """Move all parameters once and return the global norm of gradients before clipping.

        Raises ``NonFiniteValue``, on every rank and with nothing changed, if gradients are not finite.
        """
        flow = self.inner
        try:
            norm = await flow.norm()
            if clip_norm is not None and math.isfinite(norm):
                await off_loop(partial(flow.scale, clip_factor(norm, clip_norm)), nbytes=self._nbytes)
            await flow.step(learning_rate)
        except NonFiniteValue:
            raise
        except BaseException:
            await self._break("optimizer_step")
            raise
        self._last = f"step {flow.step_count} with learning rate {learning_rate!r} and clip_norm {clip_norm!r}"
        return norm

    def forget(self) -> None:
        """Forget all gradients."""
        if not self._is_broken:  # otherwise they are dropped when ranks resume
            self.inner.zero_grad()
        if not self.inner.is_sharded:
            for parameter in self.inner.parameters:
                parameter.release_grad()

    @property
    def memory_savings(self) -> MemorySavings:
        """The part of parameters, gradients and states that is not held on this rank because others hold it."""
        usage, engine = self.inner.memory(), self._engine
        if engine is None:
            return savings_of(usage, None, self._nbytes)
        specs = engine.partition.specs
        parts = zip(self._own_bounds(), specs, strict=True)
        owned = sum((stop - start) * spec.dtype.itemsize for (start, stop), spec in parts)
        values = sum(spec.count * spec.dtype.itemsize for spec in specs)
        is_sharded = engine.config.stage.shards_gradients and values > 0
        return savings_of(usage, engine.memory_stats(), values, owned_gradients=owned / values if is_sharded else 1.0)

    def statistics(self) -> SyncStatistics:
        """Return times and traffic so far."""
        return self.inner.statistics() if self._times is None else replace(self._times.statistics)

    @property
    def compression(self) -> CompressionInfo:
        """The bytes that this rank has sent to other nodes."""
        return self._traffic.info

    @property
    def owns_part(self) -> bool:
        """Whether this rank owns states that no other rank has."""
        return any(start < stop for start, stop in self._own_bounds())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _own_bounds(self) -> list[tuple[int, int]]:
        """Return the bounds of the part of each parameter that this rank owns."""
        if self._engine is None:
            return []
        partition, rank = self._engine.partition, self._groups.world.rank
        return [partition.bounds(index, rank) for index in range(len(partition.specs))]

    def _compare(self) -> Comparison:
        """Return the comparison of this rank's work since the last run with that of the others."""
        self._runs += 1
        frozen = (parameter.name for parameter in self.inner.parameters if is_frozen(parameter))
        lines = (f"{self._intake.micro_steps} micro-steps after {self._last}", frozen_line(frozen))
        return Comparison(self._groups.world, {ALL: lines}, key=self._key, rare=f"{self._key}/{self._runs}")

    def _report(self, ready: OnGradient, name: str) -> None:
        """Give ``name`` its sum, which the engine takes from the parameter.  From any thread."""
        self._intake.give_back(name)
        ready(name)

    def _complete(self) -> None:
        """Handle the last gradient: all are final."""
        if self._times is None:
            self._intake.fill()
        else:
            self._times.last_gradient()
            self._intake.give_back()

    def _count_traffic(self) -> None:
        if self._engine is None or self._times is None:
            self._traffic.end(self._intake.buffer.nbytes)
            return
        partition = self._engine.partition
        frozen = {index for index, parameter in enumerate(self.inner.parameters) if is_frozen(parameter)}
        nbytes = sum(partition.bucket_nbytes(bucket) for bucket in without_frozen(partition, frozen))
        self._traffic.end(nbytes // 2)  # a reduce-scatter sends half of what an all-reduce does
        self._times.end()

    async def leave(self, cause: BaseException) -> None:
        """Abort, on all ranks, their next common operation, with ``cause`` as the reason.  Waits a bounded time."""
        reason = Abandoned(cause)
        engine = self._engine
        with suppress(Abandoned, TimeoutError, AsyncparError), cancel_reason() as why:
            why.take(reason)
            if engine is not None:  # in the middle of its step, or broken, there is more than the next run to abort
                await engine.leave(str(reason))
                self._is_broken = True
                self._compare().close()
                return
            async with asyncio.timeout(_FAREWELL_SECONDS), self.run():
                raise reason

    async def resume(self) -> None:
        """Meet again after a failure, which was one of all ranks; all of them call it."""
        if self._is_broken:
            await self.inner.resume(0)
            self._is_broken = False

    async def _break(self, why: str) -> None:
        """Notify the other ranks of a sharded flow, which must resume."""
        if self._engine is not None:
            self._is_broken = True
            await self._engine.abandon(why)


def replicated(
    intake: GradientIntake, rule: Rule, config: MultiNodeConfig, groups: HostGroups, *, name: str
) -> NodeFlow:
    """Return the flow in which every rank moves all parameters: a ``GradientSynchronizer`` with nodes as hosts."""
    world = groups.world
    parallelism = ThreeDParallelismConfig(
        dp_size=world.size, comm_strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE
    )
    compression = GradientCompressionConfig(codec=BETWEEN_NODES, error_feedback=config.zero_config.error_feedback)
    synchronizer = GradientSynchronizer(
        parallelism,
        RankMapping(parallelism, world.rank),
        communicator=world,
        bucketing=GradientBucketingConfig(
            bucket_size_mb=config.bucket_size_mb, max_buckets=_UNLIMITED, overlap_communication=config.overlaps
        ),
        compression=compression if config.compresses else None,
        name=f"{name}/gradients",
        hosts=groups if groups.hosts > 1 else None,
    )
    flow = ReplicatedFlow(
        intake.parameters,
        rule,
        synchronizer,
        replicas=1,
        rank=world.ranks[world.rank],
        gradients=intake.gradients,
        weight=1 if config.zero_config.average else world.size,
    )
    return NodeFlow(flow, intake, config, groups, name=name)


async def sharded(
    intake: GradientIntake,
    layers: Sequence[Stage[Any]],
    rule: Rule,
    config: MultiNodeConfig,
    groups: HostGroups,
    *,
    bridge: LoopBridge | None,
    name: str,
) -> tuple[NodeFlow, Sequence[Stage[Any]]]:
    """Return the flow in which ranks shard states, gradients or parameters, and the layers to compute with.

    Rows are added node by node on their way to their owners; buckets overlap, and are as large, as both configurations
    allow.
    """
    zero = replace(config.zero_config, overlap_comm=config.overlaps, bucket_size_mb=config.bucket_size_mb)
    sums: RowSums = ReplicaSums(groups.world, is_compressed=zero.gradient_compression, algorithm=zero.algorithm)
    if groups.hosts > 1:
        sums = NodeSums(groups, is_compressed=config.compresses_between_nodes)
    times = ShardedTimes(groups, asyncio.get_running_loop().time)
    engine = ZeroEngine(
        intake.parameters,
        rule,
        zero,
        groups.world,
        bridge=bridge,
        name=f"{name}/zero",
        row_sums=TimedSums(sums, lambda: times.record.intervals, times.clock),
    )
    prepared = tuple(engine.shard(layer) for layer in layers)
    await engine.prepare()
    flow = ShardedFlow(engine, None)
    return NodeFlow(flow, intake, config, groups, name=name, engine=engine, times=times), prepared
