"""The memory that a synchronizer reports is what numpy gave it: for every scheme, and after every change."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Parameter
from asyncpar.testing.world import local_world
from tests.gradsync.worlds import CODECS
from tests.held import held_arrays
from tests.products import in_turn

SHAPES = {"table": (256, 128), "weight": (128, 200), "bias": (4096,)}
BYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
LAYOUTS: dict[str, list[str]] = {
    "alone": ["a"],
    "two": ["a", "a"],
    "three": ["a", "a", "a"],
    "hosts": ["a", "a", "b", "b"],
}


class World:
    """Synchronizers and parameters of some ranks; the parameters are made first."""

    def __init__(self, nodes: Any) -> None:
        self.nodes = nodes
        self.parameters = [
            [Parameter(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()] for _ in nodes
        ]
        for one in self.parameters:
            for parameter in one:
                parameter.grad[...] = 1.0
        self.synchronizers: list[GradientSynchronizer] = []

    def make(self, **settings: Any) -> None:
        config = ThreeDParallelismConfig(
            dp_size=len(self.nodes), comm_strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE
        )
        self.synchronizers = [
            GradientSynchronizer(config, RankMapping(config, node.rank), communicator=node.world, **settings)
            for node in self.nodes
        ]

    async def step(self) -> None:
        async def one(synchronizer: GradientSynchronizer, parameters: list[Parameter]) -> None:
            async with synchronizer.step(parameters):
                pass

        await asyncio.gather(*map(one, self.synchronizers, self.parameters))

    @property
    def total_bytes(self) -> int:
        return sum(synchronizer.get_memory_usage().total for synchronizer in self.synchronizers)


@pytest.mark.parametrize(("layout", "codec"), in_turn(LAYOUTS, CODECS))
async def test_all_that_is_held_is_told(codec: CodecChoice, layout: str) -> None:
    async with local_world(len(LAYOUTS[layout]), hosts=LAYOUTS[layout]) as nodes, asyncio.timeout(30):
        world = World(nodes)
        bucketing = GradientBucketingConfig(bucket_size_mb=0.1)
        with held_arrays() as held:
            world.make(compression=GradientCompressionConfig(codec=codec), bucketing=bucketing)
            for _ in range(2):
                await world.step()
        assert world.total_bytes == pytest.approx(held.nbytes, rel=0.02)
        assert world.total_bytes >= BYTES * len(nodes)
        for synchronizer in world.synchronizers:
            usage = synchronizer.get_memory_usage()
            assert synchronizer.get_sync_stats().memory_bytes == usage.total
            assert (usage.residuals > 0) == bool(synchronizer.residuals())
            synchronizer.clear_buffers()
        assert world.total_bytes == 0


async def test_sums_of_micro_steps_and_views_count_once() -> None:
    async with local_world(2) as nodes, asyncio.timeout(30):
        world = World(nodes)
        world.make()

        class Model:
            def __init__(self, parameters: list[Parameter]) -> None:
                self.parameters = lambda: parameters

        for synchronizer, parameters in zip(world.synchronizers, world.parameters, strict=True):
            synchronizer.accumulate(Model(parameters))
            assert synchronizer.get_memory_usage().accumulation == BYTES
        await world.step()
        assert world.total_bytes == 2 * BYTES, "the bucket alone"


async def test_buffers_can_be_made_before_the_first_step() -> None:
    async with local_world(3) as nodes, asyncio.timeout(30):
        world = World(nodes)
        world.make(compression=GradientCompressionConfig(codec="int8"))
        for synchronizer, parameters in zip(world.synchronizers, world.parameters, strict=True):
            await synchronizer.reserve(parameters)
        reserved = world.total_bytes
        assert reserved > 3 * 3 * BYTES
        await world.step()
        assert world.total_bytes == reserved


async def test_what_waits_for_the_next_layout_counts() -> None:
    async with local_world(2) as nodes, asyncio.timeout(30):
        world = World(nodes)
        world.make(compression=GradientCompressionConfig(codec="int8"))
        await world.step()
        for synchronizer in world.synchronizers:
            synchronizer.update_bucketing_config(GradientBucketingConfig(bucket_size_mb=1.0))
            usage = synchronizer.get_memory_usage()
            assert (usage.buffers, usage.residuals) == (0, BYTES)
