"""States, gradients or parameters are sharded over all ranks: rows are added node by node on their way to owners."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.errors import NonFiniteValue
from asyncpar.gradsync import SyncStatistics
from asyncpar.gradsync.statistics import StepRecord, SyncTraffic
from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.flow import StepFlow
from asyncpar.multinode.gradient_buffer import GradientIntake
from asyncpar.multinode.groups import NodeGroups
from asyncpar.multinode.micro_steps import MicroStepRoll
from asyncpar.multinode.node_sum import NodeSums, TimedSums
from asyncpar.multinode.statistics import CompressionInfo, LeaderTraffic, MemoryUsage
from asyncpar.nn import Parameter, Stage
from asyncpar.nn.optimizers import Rule, clip_factor
from asyncpar.nn.parameter import Array, OnGradient
from asyncpar.zero.config import ZeROConfig
from asyncpar.zero.engine import ZeroEngine
from asyncpar.zero.row_sum import ReplicaSums, RowSums
from asyncpar.zero.share import StatePiece


class ShardedFlow(StepFlow):
    """A ``ZeroEngine`` over the world.  Await ``prepare`` before the first step."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        rule: Rule,
        config: MultiNodeConfig,
        groups: NodeGroups,
        *,
        bridge: LoopBridge | None,
        name: str,
    ) -> None:
        self._groups = groups
        self._is_compressed = config.compresses_between_nodes
        self._loop = asyncio.get_running_loop()
        self._record = StepRecord()
        self._engine = ZeroEngine(
            parameters,
            rule,
            _settings(config),
            groups.world,
            bridge=bridge,
            name=f"{name}/zero",
            row_sums=TimedSums(self._make_sums(config.zero_config), lambda: self._record.intervals, self._loop.time),
        )
        self._roll = MicroStepRoll(groups.world, key=f"{name}/micro_steps")
        self._traffic = LeaderTraffic(groups, is_compressed=self._is_compressed)
        self._statistics = SyncStatistics()
        self._is_broken = False

    async def prepare(self, layers: Sequence[Stage[Any]]) -> tuple[Stage[Any], ...]:
        """Shard what is to be sharded, and return the layers to compute with."""
        sharded = tuple(self._engine.shard(layer) for layer in layers)
        await self._engine.prepare()
        return sharded

    @asynccontextmanager
    async def run(self, intake: GradientIntake) -> AsyncIterator[OnGradient]:
        call = self._roll.open(intake.micro_steps)
        try:
            await self._resume()
            self._traffic.begin()
            record, before = StepRecord(), self._sent()
            self._record = record
            yield lambda name: self._report(name, intake)
            record.last_gradient_at = self._loop.time()
            intake.give_back()
            await call.run()
            await self._engine.reduce()
        except BaseException:
            await self._break("synchronization")
            call.close()
            raise
        nbytes = sum(self._engine.partition.bucket_nbytes(bucket) for bucket in self._engine.partition.buckets)
        self._traffic.end(nbytes // 2)  # a reduce-scatter sends half of what an all-reduce does
        record.count(self._sent() - before, least_bytes=None)
        record.add_to(self._statistics)
        call.check()

    async def apply(self, intake: GradientIntake) -> None:
        self._engine.scale(1.0 / intake.micro_steps)
        intake.clear()

    async def step(self, learning_rate: float, *, clip_norm: float | None) -> float:
        engine = self._engine
        try:
            norm = await engine.global_norm()
            if clip_norm is not None and math.isfinite(norm):
                engine.scale(clip_factor(norm, clip_norm))
            await engine.step(learning_rate)
            self._roll.took(engine.step_count, learning_rate, clip_norm)
        except NonFiniteValue:
            raise
        except BaseException:
            await self._break("optimizer_step")
            raise
        return norm

    def forget(self) -> None:
        if not self._is_broken:  # else they are forgotten when ranks come together again
            self._engine.zero_grad()

    def memory(self) -> MemoryUsage:
        stats = self._engine.memory_stats()
        return MemoryUsage(
            parameters=stats.parameters + stats.gathered,
            gradients=stats.gradients,
            optimizer_states=stats.states,
            buffers=stats.buffers,
            residuals=stats.residuals,
        )

    @property
    def memory_savings(self) -> float:
        return self._engine.memory_stats().reduction

    def statistics(self) -> SyncStatistics:
        return replace(self._statistics)

    async def pieces(self) -> list[StatePiece]:
        await self._resume()
        return self._engine.state_pieces()

    async def restore(self, arrays: Mapping[tuple[str, str], Array], *, step_count: int) -> None:
        await self._engine.restore(arrays, step_count=step_count)
        self._is_broken = False

    def reduction_state(self) -> dict[str, Array]:
        return dict(self._engine.residuals())

    @property
    def reductions(self) -> int:
        return self._engine.step_count

    def restore_reduction(self, state: Mapping[str, Array] | None, reductions: int) -> None:  # noqa: ARG002
        self._engine.restore_residuals(state or {})

    @property
    def compression(self) -> CompressionInfo:
        return self._traffic.info

    @property
    def owns_part(self) -> bool:
        partition, rank = self._engine.partition, self._groups.world.rank
        bounds = [partition.bounds(index, rank) for index in range(len(partition.specs))]
        return any(start < stop for start, stop in bounds)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _report(self, name: str, intake: GradientIntake) -> None:
        """The sum of ``name`` is final: the engine takes it off the parameter.  From any thread."""
        intake.give_back(name)
        self._engine.ready(name)

    async def _resume(self) -> None:
        """Come together again after a failure, which was one of all ranks."""
        if self._is_broken:
            await self._engine.resume()
            self._is_broken = False

    async def _break(self, why: str) -> None:
        """Tell the others, and remember that ranks must come together again."""
        self._is_broken = True
        await self._engine.abandon(why)

    def _sent(self) -> SyncTraffic:
        groups = self._groups
        leaders = [] if groups.leaders is None else [groups.leaders]
        return SyncTraffic.read([groups.world, groups.node, *leaders])

    def _make_sums(self, zero: ZeROConfig) -> RowSums:
        """Return what reduces buckets: node by node, if there are several."""
        if self._groups.num_nodes > 1:
            return NodeSums(self._groups, is_compressed=self._is_compressed)
        return ReplicaSums(self._groups.world, is_compressed=zero.gradient_compression, algorithm=zero.algorithm)


def _settings(config: MultiNodeConfig) -> ZeROConfig:
    """Return what the engine goes by: buckets overlap, and are as large, as both configurations allow."""
    return replace(config.zero_config, overlap_comm=config.overlaps, bucket_size_mb=config.bucket_size_mb)
