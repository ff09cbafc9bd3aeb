"""Construction of this rank's part of a model, and of everything that trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.checks import is_default
from asyncpar.core.config.parallel import (
    CommunicationStrategy,
    MemoryOptimizationStrategy,
    RankMapping,
    ThreeDParallelismConfig,
)
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer, NonFinitePolicy
from asyncpar.hybrid.config import HybridConfig
from asyncpar.hybrid.model import Loss, ParallelModel, StageLayers, StagePlace, stage_ranges
from asyncpar.hybrid.watch import FiniteWatch, WatchedStage, watched_loss
from asyncpar.nn.optimizers import distinct
from asyncpar.nn.parameter import Parameter
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Stage
from asyncpar.nn.tensor.group import BridgedGroup, SingleRankGroup, TensorGroup
from asyncpar.pipeline.alarm import StepAlarm
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.offload.manager import MemoryManager
from asyncpar.pipeline.recompute import apply_memory_strategy
from asyncpar.pipeline.schedule import Schedule
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.zero.engine import ZeroEngine
from asyncpar.zero.flow import GradientFlow, ReplicatedFlow
from asyncpar.zero.sharded_flow import ShardedFlow

T = TypeVar("T")
Args = TypeVarTuple("Args")


class QuietWorker(WorkerThread):
    """Computes without warnings of overflow and invalid values, which all ranks detect when they compare norms."""

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await super().run(_quietly, function, args)


def _quietly(function: Callable[[*Args], T], args: tuple[*Args]) -> T:
    with np.errstate(over="ignore", invalid="ignore"):
        return function(*args)


_GIGABYTE = 1_000_000_000
_BUILT = "hybrid/built"
"""The key of the barrier at which every rank has built its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """This rank's stages and everything that trains them, made by ``assemble``; ``close`` ends it."""

    groups: ProcessGroups
    schedule: Schedule
    stages: Sequence[Stage[Any]]
    parameters: tuple[Parameter, ...]
    flow: GradientFlow
    alarm: StepAlarm
    executor: PipelineExecutor
    loss: Loss
    layers: Sequence[StageLayers]
    slices: TensorGroup
    watch: FiniteWatch
    bridge: LoopBridge
    worker: QuietWorker
    memory: MemoryManager
    memory_limit: int
    layout: str
    """The order of ranks and the way of reducing gradients, in words: equal on ranks that can exchange their kept
    reduction state.
    """

    def set_training(self, is_training: bool) -> None:
        """Switch the training behaviour of layers, such as dropout, on or off."""
        for layers in self.layers:
            layers.set_training(is_training)

    async def close(self) -> None:
        """Free everything.  Idempotent."""
        self.bridge.interrupt()
        await self.executor.close()
        self.worker.close()
        self.flow.close()


class GradientScale:
    """The factor of the gradient of each micro-batch's summed loss on the last stage; set before every step."""

    value = 1.0

    def __call__(self) -> float:
        return self.value


async def agree_on_groups(
    config: HybridConfig, model: ParallelModel, world: Communicator, *, name: str
) -> ProcessGroups:
    """Compare settings and model on all ranks of ``world``, and return the groups of the coordinator ``name``.

    Raises ``UsageError``, on every rank, if ranks differ or the model cannot be distributed like that.
    """
    settings = {**config.settings(), "model": dict(model.identity)}
    own = world.subgroup(range(world.size), name="training", key=name, has_own_timeout=True)
    assert own is not None, "this rank is one of its ranks"
    groups = await ProcessGroups.create(config.parallelism, own, settings=settings, purpose="hybrid")
    model.check(config.parallelism)
    for group in (own, *groups.names.values()):  # groups made from them later begin with theirs
        group.timeout = _choose_timeout(config.parallelism, world)
    return groups


def _choose_timeout(parallelism: ThreeDParallelismConfig, world: Communicator) -> float | None:
    """Return the timeout of the groups: that set by the user, the configuration's before the world's."""
    milliseconds = parallelism.communication_timeout_ms
    return milliseconds / 1000 if not is_default(milliseconds) or is_default(world.timeout) else world.timeout


async def assemble(config: HybridConfig, model: ParallelModel, groups: ProcessGroups, scale: GradientScale) -> Assembly:
    """Build this rank's stages, and everything that runs and trains them.  All ranks of ``groups`` call it.

    An error on some ranks only, such as a part of the model that cannot be built, raises there, and ``PeerCancelled``
    with its text on the others.
    """
    schedule, bridge, watch = config.make_schedule(), LoopBridge(), FiniteWatch()
    slices = SingleRankGroup() if groups.tp.size == 1 else BridgedGroup(groups.tp, bridge, look=watch.share)
    try:
        layers = _build_layers(config, model, groups.mapping, schedule, slices)
        parameters = distinct(parameter for one in layers for parameter in one.joined().parameters())
        joined, flow, engine = await _make_flow(config, groups, layers, parameters, bridge)
    except Exception as error:
        groups.world.refuse("barrier", error, key=_BUILT)
        raise
    await groups.world.barrier(key=_BUILT)
    if engine is not None:
        await engine.prepare()
    numbers = schedule.virtual_stages_of(groups.mapping.pp_rank)
    stages = [WatchedStage(stage, number, watch) for stage, number in zip(joined, numbers, strict=True)]
    limit = int(config.parallelism.max_memory_per_device * _GIGABYTE)
    room = await _find_room(limit, flow.nbytes_needed, groups)
    memory = MemoryManager(strategy=_of_manager(config.parallelism), limit=room, folder=config.offload_folder)
    worker = QuietWorker(f"rank {groups.mapping.global_rank}", bridge)
    loss = watched_loss(model.make_loss(slices, scale), watch)
    alarm = StepAlarm(groups.world)
    executor = PipelineExecutor(
        schedule, stages, communicator=groups.pp, compute=worker, loss=loss, memory=memory, alarm=alarm
    )
    return Assembly(
        groups=groups,
        schedule=schedule,
        stages=stages,
        parameters=parameters,
        flow=flow,
        alarm=alarm,
        executor=executor,
        loss=loss,
        layers=layers,
        slices=slices,
        watch=watch,
        bridge=bridge,
        worker=worker,
        memory=memory,
        memory_limit=limit,
        layout=_describe_layout(config, groups),
    )


def _build_layers(
    config: HybridConfig, model: ParallelModel, mapping: RankMapping, schedule: Schedule, slices: TensorGroup
) -> list[StageLayers]:
    """Return the layers of this rank's virtual stages, recomputed according to the strategy."""
    parallelism = config.parallelism
    ranges, last = stage_ranges(parallelism, schedule), schedule.num_virtual_stages - 1
    built: list[StageLayers] = []
    for virtual in schedule.virtual_stages_of(mapping.pp_rank):
        tables = [layers.table for layers in built if layers.table is not None]
        place = StagePlace(
            layers=ranges[virtual],
            is_first=virtual == 0,
            is_last=virtual == last,
            replica=mapping.dp_rank,
            storage=config.storage_precision.storage,
            table=tables[0] if tables and virtual == last else None,
        )
        layers = model.build(place, slices)
        blocks = apply_memory_strategy(
            parallelism.memory_strategy,
            layers.blocks,
            recompute_all=parallelism.enable_gradient_checkpointing,
        )
        built.append(replace(layers, blocks=blocks))
    return built


async def _make_flow(
    config: HybridConfig,
    groups: ProcessGroups,
    layers: Sequence[StageLayers],
    parameters: Sequence[Parameter],
    bridge: LoopBridge,
) -> tuple[list[Sequential], GradientFlow, ZeroEngine | None]:
    """Return the stages by chunk, the gradient flow, and the engine to prepare, if any; sends nothing."""
    if config.zero.stage is ZeROStage.NONE:
        synchronizer = GradientSynchronizer(
            config.parallelism,
            groups.mapping,
            communicator=groups.world,
            bucketing=config.bucketing,
            compression=config.compression,
            when_not_finite=NonFinitePolicy.SKIP_STEP,
            name="hybrid/gradients",
        )
        await synchronizer.reserve(parameters)
        flow = ReplicatedFlow(
            parameters, config.rule, synchronizer, replicas=groups.dp.size, rank=groups.world.ranks[groups.world.rank]
        )
        return [one.joined() for one in layers], flow, None
    engine = ZeroEngine(parameters, config.rule, config.zero, groups.dp, bridge=bridge, name="hybrid/zero")
    engine.runs = len(layers)
    stages = [one.joined(engine.shard) for one in layers]
    return stages, ShardedFlow(engine, _synchronizer_of_shards(config, groups)), engine


def _synchronizer_of_shards(config: HybridConfig, groups: ProcessGroups) -> GradientSynchronizer | None:
    """Return the synchronizer over the slices and stages of one replica; None if there are none."""
    if groups.model.size == 1:
        return None
    parallelism = replace(config.parallelism, dp_size=1)
    return GradientSynchronizer(
        parallelism,
        RankMapping(parallelism, groups.model.rank),
        communicator=groups.model,
        bucketing=config.bucketing,
        when_not_finite=NonFinitePolicy.SKIP_STEP,
        name="hybrid/shared",
    )


def _describe_layout(config: HybridConfig, groups: ProcessGroups) -> str:
    """Return the description of how residuals are placed on ranks, with hosts where only one rank of each has any."""
    by_host = config.parallelism.comm_strategy is CommunicationStrategy.HIERARCHICAL_ALL_REDUCE
    hosts = f", hosts {groups.world.hosts}" if by_host or config.compression.is_automatic else ""
    return f"{config.parallelism.rank_order()}, {config.compression}, {config.bucketing}, {config.zero}{hosts}"


async def _find_room(limit: int, taken: int, groups: ProcessGroups) -> int:
    """Return the number of bytes left for activations.  Raises ``UsageError``, on all ranks, if one has none."""
    gathered = await groups.world.all_gather_object(taken, key="hybrid/memory", wanted=int)
    most = max(gathered)
    if most >= limit:
        raise UsageError(
            f"max_memory_per_device: parameters, gradients, states and buckets of rank {gathered.index(most)} take "
            f"{most / _GIGABYTE:.3g} GB, got {limit / _GIGABYTE:g} GB; use more stages, tensor-parallel ranks or ZeRO"
        )
    return limit - taken


def _of_manager(parallelism: ThreeDParallelismConfig) -> MemoryOptimizationStrategy:
    """Return the strategy of the memory manager: only EXTREME offloads more than it must."""
    if parallelism.memory_strategy is MemoryOptimizationStrategy.EXTREME:
        return MemoryOptimizationStrategy.EXTREME
    return MemoryOptimizationStrategy.BASIC
