"""Effects of the options of sharded, multi-node and 3D-parallel training, over ranks of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncpar.backends import BackendConfig, CommunicationRuntime
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.parallel import CommunicationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import (
    HybridConfig,
    LossScaling,
    Precision,
    ThreeDParallelismCoordinator,
    TransformerModel,
)
from asyncpar.multinode import MultiNodeConfig, MultiNodeTrainer
from asyncpar.nn import Initializer, Linear
from asyncpar.nn.optimizers import SGD, AdamW
from asyncpar.nn.tensor import BridgedGroup, ColumnParallelLinear, RowParallelLinear, TensorRegion
from asyncpar.node import Node
from asyncpar.pipeline import PipelineSchedule
from asyncpar.testing import local_world
from asyncpar.zero import MemoryExceeded, ZeROConfig, ZeROOptimizer, ZeROStage
from tests.hybrid.worlds import RATE, TINY, draw_batch
from tests.multinode.worlds import RULE, Model, config_of, node_world
from tests.multinode.worlds import on_all as on_members
from tests.options.effects import Refused, With, digest, effects
from tests.zero import layers, replicas
from tests.zero.test_sharded_layers import continue_once_gathered

SMALL = replace(TINY, layers=2, dtype="float32")
ROWS = 8
PATIENCE, INTERRUPTED = 30.0, 0.2
"""Seconds for what comes, and for what never comes."""


def traffic_of(communicator: Communicator) -> list[Any]:
    """Return what operations were done how often, and what they sent, but for times."""
    return [(one.operation, one.algorithm, one.calls, one.payload_bytes) for one in communicator.traffic.operations]


# -- three dimensions -------------------------------------------------------------------------------------------------


async def coordinate(
    *,
    world: int = 2,
    absent: int | None = None,
    model: dict[str, Any] | None = None,
    steps: int = 2,
    **settings: Any,
) -> Any:
    """Train for a few steps; return what can be seen of it on rank 0.

    Rank ``absent`` does not take part.  Without a limit of their own the others wait for it for half a minute, so they
    are interrupted.
    """
    over = asyncio.Event()
    limit = INTERRUPTED if absent is not None and "communication_timeout_ms" not in settings else PATIENCE
    layout = {
        name: settings.pop(name) for name in list(settings) if name in ThreeDParallelismConfig.__dataclass_fields__
    }
    parallelism = ThreeDParallelismConfig(**{"dp_size": 2, "num_layers": 2, **layout})
    config = HybridConfig(parallelism=parallelism, **settings)

    async def main(node: Node) -> Any:
        made = TransformerModel(config=SMALL, **(model or {}))
        async with await ThreeDParallelismCoordinator.create(config, made, node.world) as coordinator:
            seen: list[Any] = []
            dp, mapping = parallelism.dp_size, coordinator.groups.mapping
            for step in range(steps):
                if node.rank == absent:
                    await over.wait()
                    return None
                tokens, targets = draw_batch(SMALL, step, rows=ROWS)
                own = slice(mapping.dp_rank * ROWS // dp, (mapping.dp_rank + 1) * ROWS // dp)
                parts = config.micro_batches
                try:
                    async with asyncio.timeout(limit):
                        result = await coordinator.train_step(
                            np.array_split(tokens[own], parts), np.array_split(targets[own], parts), learning_rate=RATE
                        )
                except UsageError:
                    raise
                except (AsyncparError, TimeoutError) as error:
                    over.set()
                    return type(error).__name__
                seen.append((result.loss, result.tokens, result.gradient_norm, result.is_skipped))
                seen.append((result.pipeline.peak_in_flight, coordinator.loss_scale))
            pieces = coordinator.pieces()
            seen.append([(one.parameter, one.kind, one.slice, one.flat, digest(one.array)) for one in pieces])
            seen.append([one.value.dtype.name for one in coordinator.parameters()])
            groups = coordinator.groups
            seen += [traffic_of(group) for group in (groups.world, groups.dp, groups.tp)]
            seen.append(coordinator._session.assembly.memory.stats.offloaded.count)  # noqa: SLF001  # what went to disk shows in no result
            return seen

    async with local_world(world) as nodes, asyncio.timeout(2 * PATIENCE):
        results = await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True)
    for result in results:
        if isinstance(result, UsageError):
            raise result
    return repr(results[0]) if isinstance(results[0], BaseException) else results[0]


def model_of(**settings: Any) -> Any:
    return coordinate(dp_size=1, tp_size=2, model=settings)


# -- several nodes ----------------------------------------------------------------------------------------------------


async def multi_node(*, stage: ZeROStage = ZeROStage.NONE, early: bool = False, **settings: Any) -> Any:
    """Train on two nodes of two ranks; return what can be seen of it on rank 0."""
    config_of(0, 2, 2, **{"zero_config": ZeROConfig(stage=stage), **settings})

    async def main(node: Node) -> Any:
        given = {"zero_config": ZeROConfig(stage=stage), **settings}
        trainer = MultiNodeTrainer(config_of(node.rank, 2, 2, **given), RULE, communicator=node.world)
        model = Model()
        seen: list[Any] = []
        async with trainer:
            await trainer.register_parameters(model.parameters)
            for step in range(2):
                before = trainer.groups.inside.traffic
                async with trainer.synchronization() as ready:
                    model.backward(step, node.rank, 0, ready=ready)
                    for _ in range(50):
                        await asyncio.sleep(0)
                    seen.append(early and trainer.groups.inside.traffic == before)
                await trainer.apply_gradients(1)
                seen.append(await trainer.optimizer_step(0.05))
            stats = trainer.get_training_stats()
            memory = trainer.get_memory_usage().optimizer_states
            sync = stats.synchronization
            return [
                digest(*model.values().values()),
                seen,
                memory,
                stats.compression,
                sync.total_buckets_synced,
            ]

    async with node_world(2, 2) as nodes:
        return (await on_members(nodes, main))[0]


def multi_zero(**settings: Any) -> Any:
    early = settings.pop("early", False)
    return multi_node(early=early, zero_config=ZeROConfig(**{"stage": ZeROStage.NONE, **settings}))


def hybrid_zero(**settings: Any) -> Any:
    return coordinate(zero=ZeROConfig(**{"stage": ZeROStage.NONE, **settings}))


def place(**settings: Any) -> Any:
    """Open a trainer in a world of one."""
    return alone(config=MultiNodeConfig(**settings))


async def alone(*, config: MultiNodeConfig | None = None, given: bool = False, **settings: Any) -> Any:
    """Train in a world of one, which is opened by what the settings say."""
    async with local_world(1) as nodes:
        if given or settings.pop("communicator", None):
            settings["communicator"] = nodes[0].world
        if settings.pop("runtime", None):
            settings["runtime"] = CommunicationRuntime()
        trainer = MultiNodeTrainer(config or MultiNodeConfig(), RULE, **settings)
        async with trainer:
            await trainer.register_parameters(Model().parameters)
            trainer.update_gradients({one.name: one.value for one in Model().parameters})
            await trainer.synchronize_gradients()
            runtime = settings.get("runtime")
            return (
                trainer.groups.world is nodes[0].world,
                runtime is not None and runtime.groups,
                trainer.groups.world.timeout,
            )


async def names_of_trainers(**settings: Any) -> Any:
    """Let ranks meet by the name of their trainers: rank 1 has the default."""

    async def main(node: Node) -> Any:
        node.world.timeout = INTERRUPTED if settings else PATIENCE
        chosen = settings if node.rank == 0 else {}
        trainer = MultiNodeTrainer(config_of(node.rank, 2, 1), RULE, communicator=node.world, **chosen)
        try:
            await trainer.initialize_environment()
        except AsyncparError as error:
            return type(error).__name__
        return "they meet"

    async with node_world(2, 1) as nodes:
        return (await on_members(nodes, main))[0]


# -- sharding ---------------------------------------------------------------------------------------------------------


async def shard(**settings: Any) -> Any:
    """Take three steps with sharded states; return what can be seen of it on rank 0."""
    async with replicas.engines(2, **settings) as made:
        pools = [engine.communicator for engine in made]
        early: list[bool] = []
        for step in range(3):
            for engine in made:
                engine.zero_grad()
                replicas.give_gradients(engine.parameters, rank=engine.communicator.rank, step=step)
            before = traffic_of(pools[0])
            for engine in made:
                for parameter in reversed(engine.parameters):
                    engine.ready(parameter.name)
            for _ in range(50):
                await asyncio.sleep(0)
            early.append(traffic_of(pools[0]) == before)
            await replicas.on_all(made, lambda engine: engine.reduce())
            await replicas.on_all(made, lambda engine: engine.step(0.05))
        stats = made[0].memory_stats()
        values = await replicas.on_all(made, replicas.whole_values)
        return early, stats, traffic_of(pools[0]), digest(*values[0].values())


def shard_config(**settings: Any) -> Any:
    return shard(**settings)


async def prefetch(**settings: Any) -> Any:
    """Compute with gathered layers; return whether the second one was gathered while the first computed."""
    seen: list[bool] = []
    waiting: list[Any] = []
    patience = INTERRUPTED if settings.get("prefetch_depth") == 0 else PATIENCE

    class Waiting(Linear):
        may_go_on = threading.Event()

        def forward(self, x: Any) -> Any:
            seen.append(self.may_go_on.wait(patience))
            return super().forward(x)

    def make() -> Any:
        waiting.append(Waiting("one", 6, 9, initializer=Initializer.from_seed(3)))
        return [waiting[-1], *layers.make_layers()[1:]]

    try:
        async with layers.replicas(2, make=make, **settings) as made:
            for replica, layer in zip(made, waiting, strict=True):
                continue_once_gathered(replica, 1, layer)
            await asyncio.gather(*(one.run(0) for one in made))
    except MemoryExceeded:
        return "too little"
    return seen


async def optimize(**settings: Any) -> Any:
    """Take a step of the optimizer over shards; return the values."""

    async def main(node: Node) -> Any:
        parameters = replicas.draw_parameters()
        optimizer = ZeROOptimizer(SGD(), ZeROConfig(), node.world, **settings)
        await optimizer.register_parameters(parameters)
        replicas.give_gradients(parameters, rank=node.rank, step=0)
        await optimizer.optimizer_step()
        return digest(*(one.value for one in parameters))

    async with local_world(2) as nodes, asyncio.timeout(20.0):
        return (await replicas.on_all(nodes, main))[0]


# -- layers over two ranks --------------------------------------------------------------------------------------------


async def on_slices(make: Any, *, rows: Sequence[int] = (2, 4, 8)) -> Any:
    """Run a layer on two ranks, each in a thread of its own; return what rank 0 has."""

    async def main(node: Node) -> Any:
        bridge = LoopBridge()
        worker = WorkerThread(f"rank {node.rank}", bridge)
        try:
            group, layer, x = make(node, bridge, np.random.default_rng(1).normal(size=rows))
            y, saved = await worker.run(layer.forward, x)
            await worker.run(layer.backward, saved, np.ones_like(y))
            return y.shape, digest(y), traffic_of(node.world), group.seconds_waiting > 1e6
        finally:
            worker.close()

    async with local_world(2) as nodes, asyncio.timeout(20.0):
        return (await replicas.on_all(nodes, main))[0]


def bridged_group(**settings: Any) -> Any:
    ticks = iter(float(10**9 * count) for count in range(1000))
    every: dict[str, Any] = {"clock": lambda: next(ticks), "look": lambda x: x.fill(1.0)}
    given = {name: every[name] for name in settings}

    def make(node: Node, bridge: LoopBridge, x: Any) -> Any:
        group = BridgedGroup(node.world, bridge, **given)
        layer = RowParallelLinear(
            "l", 8, 6, region=TensorRegion(group=group), initializer=Initializer.from_seed(0), input_is_parallel=False
        )
        return group, layer, x.astype(np.float32)

    return on_slices(make)


def column(**settings: Any) -> Any:
    def make(node: Node, bridge: LoopBridge, x: Any) -> Any:
        group = BridgedGroup(node.world, bridge)
        region = TensorRegion(group=group, **{name: settings[name] for name in settings if name == "sequence_parallel"})
        more = {name: settings[name] for name in settings if name != "sequence_parallel"}
        layer = ColumnParallelLinear("l", 8, 6, region=region, initializer=Initializer.from_seed(0), **more)
        return group, layer, x.astype(np.float32)

    return on_slices(make)


def row(**settings: Any) -> Any:
    width = 8 if settings.get("input_is_parallel") is False else 4

    def make(node: Node, bridge: LoopBridge, x: Any) -> Any:
        group = BridgedGroup(node.world, bridge)
        region = TensorRegion(group=group)
        layer = RowParallelLinear("l", 8, 6, region=region, initializer=Initializer.from_seed(0), **settings)
        return group, layer, x.astype(np.float32)

    return on_slices(make, rows=(2, 4, width))


GPIPE = PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=PipelineScheduleType.GPIPE)
PIPED = {"dp_size": 1, "pp_size": 2, "micro_batches": 4}
TINY_BUCKETS = 1e-5

EFFECTS = [
    *effects(
        "hybrid.ThreeDParallelismConfig",
        coordinate,
        comm_strategy=CommunicationStrategy.TREE_ALL_REDUCE,
        enable_mixed_precision=True,
        max_memory_per_device=Refused(1e-6, "max_memory_per_device: parameters, gradients"),
        communication_timeout_ms=With(200, {"absent": 1}),
        micro_batch_size=Refused(7, "(inputs|targets): expected micro-batches of micro_batch_size = 7 rows"),
        order=Refused("tp-pp-dq", "order: expected"),
    ),
    *effects(
        "hybrid.HybridConfig",
        coordinate,
        micro_batches=2,
        rule=AdamW(weight_decay=0.5),
        clip_norm=0.01,
        zero=ZeROConfig(stage=ZeROStage.STAGE2),
        precision=Precision.BFLOAT16,
        loss_scaling=LossScaling(initial=1024.0),
        bucketing=GradientBucketingConfig(bucket_size_mb=0.0005),
        compression=GradientCompressionConfig(codec="int8"),
        schedule=With(GPIPE, PIPED),
        offload_folder=Refused(Path("/no/such/folder"), "folder: expected a folder that exists"),
    ),
    *effects("hybrid.TransformerModel", model_of, sequence_parallel=True, ignore_index=0),
    *effects(
        "multinode.MultiNodeConfig",
        multi_node,
        zero_config=ZeROConfig(stage=ZeROStage.STAGE2),
        gradient_compression=True,
        overlap_comm_compute=With(False, {"early": True}),
        gradient_bucket_size_mb=0.0001,
    ),
    *effects(
        "multinode.MultiNodeConfig",
        place,
        num_nodes=Refused(2, "world_size: expected 1"),
        devices_per_node=Refused(2, "world_size: expected 1"),
        node_rank=Refused(1, "node_rank: expected 0..0"),
        local_rank=Refused(1, "local_rank: expected 0..0"),
        global_rank=Refused(1, "global_rank: expected 0..0"),
        comm_backend=Refused("nothing", "backend: expected one of"),
    ),
    *effects(
        "multinode.MultiNodeConfig",
        lambda **settings: alone(config=MultiNodeConfig(**settings), given=True),
        comm_backend=Refused("gloo", "comm_backend: expected native"),
    ),
    *effects(
        "multinode.MultiNodeTrainer",
        alone,
        communicator=True,
        runtime=True,
        backend=BackendConfig(timeout=7.0),
    ),
    *effects("multinode.MultiNodeTrainer", names_of_trainers, name="other"),
    *effects(
        "zero.ZeROConfig",
        shard_config,
        stage=ZeROStage.STAGE3,
        bucket_size_mb=TINY_BUCKETS,
        overlap_comm=False,
        reduce_bucket_size=8,
        gradient_compression=True,
        error_feedback=With(False, {"gradient_compression": True}),
        average=False,
        algorithm="ring",
        pin_memory=False,
    ),
    *effects(
        "zero.ZeROConfig",
        multi_zero,
        stage=ZeROStage.STAGE1,
        bucket_size_mb=0.0001,
        overlap_comm=With(False, {"early": True}),
        reduce_bucket_size=Refused(8, "reduce_bucket_size of ZeROConfig: expected 500000000, as nothing is sharded"),
        max_memory_usage_mb=Refused(1.0, "max_memory_usage_mb of ZeROConfig: expected 1024, as nothing is sharded"),
        gradient_compression=True,
        error_feedback=With(False, {"gradient_compression": True}),
        average=False,
        algorithm=Refused("nonsense", "algorithm of ZeROConfig: expected None"),
    ),
    *effects(
        "zero.ZeROConfig",
        hybrid_zero,
        stage=ZeROStage.STAGE1,
        bucket_size_mb=Refused(0.0001, "bucket_size_mb of ZeROConfig"),
        overlap_comm=Refused(False, "overlap_comm of ZeROConfig"),
        reduce_bucket_size=Refused(8, "reduce_bucket_size of ZeROConfig"),
        max_memory_usage_mb=Refused(1.0, "max_memory_usage_mb of ZeROConfig"),
        gradient_compression=Refused(True, "gradient_compression of ZeROConfig"),
        error_feedback=Refused(False, "error_feedback of ZeROConfig"),
        average=Refused(False, "zero.average: expected True"),
        algorithm=Refused("ring", "algorithm of ZeROConfig"),
    ),
    *effects("zero.ZeROConfig", prefetch, prefetch_depth=0, max_memory_usage_mb=0.0003),
    *effects("zero.ZeROOptimizer", optimize, learning_rate=0.5, clip_norm=0.1),
    *effects("nn.tensor.BridgedGroup", bridged_group, clock=True, look=True),
    *effects("nn.tensor.ColumnParallelLinear", column, gather_output=True),
    *effects("nn.tensor.TensorRegion", column, sequence_parallel=True),
    *effects("nn.tensor.RowParallelLinear", row, input_is_parallel=False),
]
