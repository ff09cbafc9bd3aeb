"""Nothing is sharded: gradients are added inside nodes, averaged between them, and every rank moves everything."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from asyncpar.core.concurrency.offload import off_loop
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    SyncStatistics,
)
from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.flow import StepFlow
from asyncpar.multinode.gradient_buffer import GradientIntake
from asyncpar.multinode.groups import NodeGroups
from asyncpar.multinode.micro_steps import MicroStepRoll
from asyncpar.multinode.statistics import CompressionInfo, LeaderTraffic, MemoryUsage
from asyncpar.nn import Parameter
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers import MASTER, Optimizer, Rule, clip_factor
from asyncpar.nn.parameter import Array, OnGradient
from asyncpar.zero.share import VALUE, StatePiece

BETWEEN_NODES = "int8"
"""The codec of compressed gradients."""

_UNLIMITED = 1 << 16
"""Buckets: their size is what is asked for, however many that makes."""


class ReplicatedFlow(StepFlow):
    """A ``GradientSynchronizer`` that takes nodes for hosts, and an ``Optimizer``."""

    def __init__(
        self, parameters: Sequence[Parameter], rule: Rule, config: MultiNodeConfig, groups: NodeGroups, *, name: str
    ) -> None:
        parallelism = ThreeDParallelismConfig(
            dp_size=groups.world.size, comm_strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE
        )
        self._synchronizer = GradientSynchronizer(
            parallelism,
            RankMapping(parallelism, groups.world.rank),
            communicator=groups.world,
            bucketing=GradientBucketingConfig(
                bucket_size_mb=config.bucket_size_mb,
                max_buckets=_UNLIMITED,
                overlap_communication=config.overlaps,
            ),
            compression=_compression(config) if config.compresses else None,
            name=f"{name}/gradients",
            hosts=groups.as_hosts,
        )
        self._optimizer = Optimizer(parameters, rule)
        self._roll = MicroStepRoll(groups.world, key=f"{name}/micro_steps")
        self._traffic = LeaderTraffic(groups, is_compressed=config.compresses_between_nodes)
        self._weight = 1 if config.zero_config.average else groups.world.size
        self._nbytes = sum(stored_value(parameter).nbytes for parameter in parameters)

    @asynccontextmanager
    async def run(self, intake: GradientIntake) -> AsyncIterator[OnGradient]:
        call = self._roll.open(intake.micro_steps)
        self._traffic.begin()
        try:
            async with self._synchronizer.step(intake.gradients) as step:
                yield step.ready
                intake.fill()
                await call.run()
        except BaseException:
            call.close()
            raise
        self._traffic.end(intake.buffer.nbytes)
        call.check()

    async def apply(self, intake: GradientIntake) -> None:
        hand_over = partial(intake.hand_over, intake.micro_steps, weight=self._weight)
        await off_loop(hand_over, nbytes=intake.buffer.nbytes)

    async def step(self, learning_rate: float, *, clip_norm: float | None) -> float:
        norms: list[float] = []
        await off_loop(partial(self._step, learning_rate, clip_norm, norms), nbytes=4 * self._nbytes)
        self._roll.took(self._optimizer.step_count, learning_rate, clip_norm)
        return norms[0]

    def forget(self) -> None:
        self._optimizer.zero_grad()
        for parameter in self._optimizer.parameters:
            parameter.release_grad()

    def memory(self) -> MemoryUsage:
        parameters, held = self._optimizer.parameters, self._synchronizer.get_memory_usage()
        return MemoryUsage(
            parameters=self._nbytes,
            gradients=sum(parameter.grad.nbytes for parameter in parameters if parameter.has_grad),
            optimizer_states=self._optimizer.nbytes,
            buffers=held.buffers,
            residuals=held.residuals,
        )

    @property
    def memory_savings(self) -> float:
        return 0.0

    def statistics(self) -> SyncStatistics:
        return self._synchronizer.get_sync_stats()

    async def pieces(self) -> list[StatePiece]:
        return [
            StatePiece(
                parameter=parameter.name,
                kind=kind,
                slice=parameter.slice,
                flat=(0, parameter.size),
                array=array.reshape(-1),
            )
            for parameter in self._optimizer.parameters
            for kind, array in self._kept(parameter).items()
        ]

    async def restore(self, arrays: Mapping[tuple[str, str], Array], *, step_count: int) -> None:
        for parameter in self._optimizer.parameters:
            for kind, array in self._kept(parameter).items():
                array[...] = arrays[parameter.name, kind].reshape(parameter.shape)
            master = self._optimizer.state(parameter.name).get(MASTER)
            if master is not None:
                parameter.value = master
        self._optimizer.step_count = step_count

    def reduction_state(self) -> dict[str, Array]:
        return self._synchronizer.state()

    @property
    def reductions(self) -> int:
        return self._synchronizer.steps

    def restore_reduction(self, state: Mapping[str, Array] | None, reductions: int) -> None:
        self._synchronizer.restore(state or {}, steps=None if state is None else reductions)

    @property
    def compression(self) -> CompressionInfo:
        return self._traffic.info

    @property
    def owns_part(self) -> bool:
        return False

    def _kept(self, parameter: Parameter) -> dict[str, Array]:
        """Return what is kept of a parameter, by kind, to be written to: of half precision, the master."""
        states = dict(self._optimizer.state(parameter.name))
        master = states.pop(MASTER, None)
        return {VALUE: stored_value(parameter) if master is None else master, **states}

    def _step(self, learning_rate: float, clip_norm: float | None, norms: list[float]) -> None:
        norm = math.sqrt(self._optimizer.squared_norm())
        if clip_norm is not None and math.isfinite(norm):
            self._optimizer.scale(clip_factor(norm, clip_norm))
        self._optimizer.step(learning_rate)
        norms.append(norm)


def _compression(config: MultiNodeConfig) -> GradientCompressionConfig:
    return GradientCompressionConfig(codec=BETWEEN_NODES, error_feedback=config.zero_config.error_feedback)
