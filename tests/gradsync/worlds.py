"""Models in pieces on real in-process worlds, and what one process would make of their gradients."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from asyncpar.core.config.names import Name
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.placement import Replication
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
)
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.shards import LayerShard, LayerType, ModelShards, ShardParameter, ShardStrategy
from asyncpar.testing.world import local_world
from tests.close_arrays import assert_close

T = TypeVar("T")

PATIENCE = 55.0
"""Seconds after which ranks are taken for hung."""

SMALL_BUCKETS = GradientBucketingConfig(bucket_size_mb=0.0005, max_buckets=64)

CODECS = ("none", "bf16", "fp16", "int8", "int4", "sign", "topk:0.1", "topk:0.1+int8", "randomk:0.25", "powersgd:2")
"""One of each kind, and a chain."""


@dataclass(frozen=True)
class StageModel:
    """One stage of a model as the synchronizer takes it."""

    shards: ModelShards
    stage: int

    def parameters(self) -> Iterator[ShardParameter]:
        return self.shards.parameters(self.stage)

    def gradients(self) -> dict[str, Array]:
        """Return copies by name."""
        return {parameter.name: parameter.grad.copy() for parameter in self.parameters()}

    def fill(self, value: Callable[[ShardParameter], Any]) -> None:
        """Give each gradient the value that a function has for its parameter."""
        for parameter in self.parameters():
            parameter.grad[...] = value(parameter)


def make_stage(stage: int, stages: int, *, dtype: str = "float32") -> StageModel:
    """Return a stage with a norm, an MLP with a down projection, and a row-parallel map with a bias.

    The first and the last stage have a tied embedding.  Shapes are those of one tensor-parallel rank.
    """
    first = 4 * stage
    layers = [
        LayerShard(layer_id=first, layer_type=LayerType.LINEAR, weight=np.ones(6, dtype), bias=np.ones(6, dtype)),
        LayerShard(
            layer_id=first + 1,
            layer_type=LayerType.MLP,
            weight=np.ones((6, 8), dtype),
            bias=np.ones(8, dtype),
            down_projection_weight=np.ones((8, 6), dtype),
        ),
        LayerShard(
            layer_id=first + 2,
            layer_type=LayerType.LINEAR,
            weight=np.ones((5, 6), dtype),
            bias=np.ones(6, dtype),
            strategy=ShardStrategy.ROW_PARALLEL,
        ),
        LayerShard(
            layer_id=first + 3,
            layer_type=LayerType.LINEAR,
            weight=np.ones(7, dtype),
            replication=Replication.PARTIAL,
        ),
    ]
    if stages > 1 and stage in (0, stages - 1):
        table = np.ones((9, 6), dtype)
        tied = LayerShard(layer_id=900 + stage, layer_type=LayerType.EMBEDDING, weight=table, is_tied=True)
        layers.insert(0 if stage == 0 else len(layers), tied)
    return StageModel(ModelShards([layers if each == stage else [] for each in range(stages)]), stage)


def draw(parameter: ShardParameter, *place: int) -> Array:
    """Return the gradient of a parameter at a place (dp, tp, pp rank, step): the same wherever it is asked for."""
    return _drawn(parameter.name, parameter.grad.shape, place)


@functools.lru_cache(maxsize=4096)
def _drawn(name: str, shape: tuple[int, ...], place: tuple[int, ...]) -> Array:
    drawn = np.random.default_rng((*place, *name.encode())).normal(size=shape)
    drawn.flags.writeable = False
    return drawn


def expected_gradients(config: ThreeDParallelismConfig, mapping: RankMapping, *, step: int = 0) -> dict[str, Array]:
    """Return what one process has for the parameters of a rank when each rank draws its gradients.

    Slices and tied tensors get the mean over replicas of their sum over both stages; what is replicated also the mean
    or the sum over tensor-parallel ranks.
    """
    sizes = (config.dp_size, config.tp_size, config.pp_size)
    return dict(_expected(sizes, mapping.tp_rank, mapping.pp_rank, step))


@functools.lru_cache(maxsize=256)
def _expected(sizes: tuple[int, int, int], tp_rank: int, pp_rank: int, step: int) -> dict[str, Array]:
    dp_size, tp_size, pp_size = sizes
    last = pp_size - 1
    stages = {stage: make_stage(stage, pp_size) for stage in {pp_rank, 0, last}}
    tied = [(stage, p) for stage, model in stages.items() for p in model.parameters() if p.placement.tied is not None]
    expected: dict[str, Array] = {}
    for parameter in stages[pp_rank].parameters():
        sources = tied if parameter.placement.tied is not None else [(pp_rank, parameter)]
        replicated = parameter.placement.replicated
        slices = range(tp_size) if replicated is not None else [tp_rank]
        total = sum(
            draw(source, dp, tp, stage, step) for dp in range(dp_size) for tp in slices for stage, source in sources
        )
        divisor = dp_size * (tp_size if replicated is Replication.WHOLE else 1)
        expected[parameter.name] = np.asarray(total) / divisor
    return expected


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a 3D-parallel world."""

    node: Node
    mapping: RankMapping
    model: StageModel
    synchronizer: GradientSynchronizer

    def draw(self, step: int = 0) -> None:
        """Fill in the gradients of a step."""
        place = (self.mapping.dp_rank, self.mapping.tp_rank, self.mapping.pp_rank, step)
        self.model.fill(lambda parameter: draw(parameter, *place))

    async def synchronize(self) -> None:
        await self.synchronizer.synchronize_gradients(self.model.shards)

    def expected(self, step: int = 0) -> dict[str, Array]:
        return expected_gradients(self.mapping.config, self.mapping, step=step)


def compressed(codec: str | None, **settings: Any) -> GradientCompressionConfig:
    """Return the settings for a codec by name."""
    return GradientCompressionConfig(codec=None if codec is None else Name(codec), **settings)


@asynccontextmanager
async def parallel_world(
    dp: int,
    tp: int = 1,
    pp: int = 1,
    *,
    wrap: Callable[[Any], Any] = lambda communicator: communicator,
    transport: str | None = "inproc",
    hosts: Sequence[str] | None = None,
    parallelism: Mapping[str, Any] | None = None,
    patience: float = PATIENCE,
    **settings: Any,
) -> AsyncIterator[list[Rank]]:
    """Yield the ranks of a world of ``dp * tp * pp``, with gradients drawn; ``settings`` go to the synchronizers."""
    config = ThreeDParallelismConfig(dp_size=dp, tp_size=tp, pp_size=pp, **(parallelism or {}))
    async with local_world(config.world_size, transport=transport, hosts=hosts) as nodes, asyncio.timeout(patience):
        ranks = []
        for node in nodes:
            mapping = RankMapping(config, node.rank)
            synchronizer = GradientSynchronizer(
                config, mapping, communicator=wrap(node.world), **{"bucketing": SMALL_BUCKETS, **settings}
            )
            model = make_stage(mapping.pp_rank, config.pp_size)
            ranks.append(Rank(node=node, mapping=mapping, model=model, synchronizer=synchronizer))
            ranks[-1].draw()
        yield ranks


async def on_all(ranks: Sequence[Rank], main: Callable[[Rank], Awaitable[T]]) -> list[T]:
    """Run ``main`` on every rank at once; results are in the order of ranks, the first error ends all."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_awaited(main(rank))) for rank in ranks]
    return [task.result() for task in running]


async def on_all_failing(ranks: Sequence[Rank], main: Callable[[Rank], Awaitable[object]]) -> list[BaseException]:
    """Run ``main`` on every rank at once and return the error of each."""
    results = await asyncio.gather(*(main(rank) for rank in ranks), return_exceptions=True)
    for rank, result in enumerate(results):
        assert isinstance(result, BaseException), f"rank {rank} went on as if nothing were wrong"
    return [result for result in results if isinstance(result, BaseException)]


async def synchronize_all(ranks: Sequence[Rank]) -> None:
    """One step on all ranks."""
    await on_all(ranks, lambda rank: rank.synchronize())


async def draw_and_synchronize(ranks: Sequence[Rank], step: int = 0) -> None:
    """One step on all ranks with the gradients of ``step``."""
    for rank in ranks:
        rank.draw(step)
    await synchronize_all(ranks)


def assert_right(rank: Rank, *, step: int = 0, tolerance: float = 1e-6) -> None:
    """Assert that the gradients are those of one process."""
    gradients = {parameter.name: parameter.grad for parameter in rank.model.parameters()}
    for name, expected in rank.expected(step).items():
        message = f"rank {rank.node.rank} {name}"
        assert_close(gradients[name], expected, rtol=tolerance, atol=tolerance, message=message)


def assert_copies_equal(ranks: Sequence[Rank]) -> None:
    """Assert that replicas, copies on tensor-parallel ranks, and both ends of a tie hold the same bits."""
    held: dict[tuple[object, ...], tuple[int, Array]] = {}
    for rank in ranks:
        for parameter in rank.model.parameters():
            placement, mapping = parameter.placement, rank.mapping
            place = () if placement.replicated is not None else (mapping.tp_rank,)
            what = (placement.tied,) if placement.tied is not None else (mapping.pp_rank, parameter.name)
            first, value = held.setdefault((*what, *place), (rank.node.rank, parameter.grad))
            if not np.array_equal(parameter.grad, value):
                message = f"{parameter.name} on ranks {first} and {rank.node.rank}"
                np.testing.assert_array_equal(parameter.grad, value, err_msg=message)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
