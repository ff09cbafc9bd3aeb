"""Replicas of layers that are sharded: stage 3 as a training loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.nn import Array, Initializer, LayerNorm, Linear, Sequential, Stage
from asyncpar.nn.optimizers import Adam
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from tests.zero.replicas import PATIENCE

MakeLayers = Callable[[], Sequence[Stage[Any]]]


class Replica:
    """A model, its engine, and the thread that it computes in."""

    def __init__(self, layers: Sequence[Stage[Any]], engine: ZeroEngine, bridge: LoopBridge) -> None:
        self.engine = engine
        self.worker = WorkerThread(f"rank {engine.communicator.rank}", bridge)
        self.model = Sequential([engine.shard(layer) for layer in layers])

    def draw_inputs(self, step: int) -> Array:
        rng = np.random.default_rng([self.engine.communicator.rank, step])
        return np.asarray(rng.normal(size=(3, 6)).astype(np.float32))

    def compute(self, x: Array) -> Array:
        """Forward and backward pass of the mean square of the output; returns the output."""
        y, saved = self.model.forward(x)
        self.model.backward(saved, y / y.size, self.engine.ready)
        return y

    async def run(self, step: int) -> Array:
        """One step."""
        self.engine.zero_grad()
        y = await self.worker.run(self.compute, self.draw_inputs(step))
        await self.engine.reduce()
        await self.engine.step(0.05)
        return y


def make_layers() -> list[Stage[Any]]:
    """Return six layers of unequal sizes."""
    initializer = Initializer.from_seed(3)
    return [
        Linear("one", 6, 9, initializer=initializer),
        LayerNorm("norm", 9, initializer=initializer),
        Linear("two", 9, 5, initializer=initializer),
        Linear("three", 5, 7, initializer=initializer),
        Linear("four", 7, 7, initializer=initializer),
        Linear("five", 7, 6, initializer=initializer, has_bias=False),
    ]


@asynccontextmanager
async def replicas(
    size: int,
    stage: ZeROStage = ZeROStage.STAGE3,
    *,
    make: MakeLayers = make_layers,
    make_bridge: Callable[[], LoopBridge] = LoopBridge,
    is_prepared: bool = True,
    **settings: Any,
) -> AsyncIterator[list[Replica]]:
    """Yield the replicas of a world."""
    config = ZeROConfig(stage=stage, **settings)
    async with local_world(size) as nodes, asyncio.timeout(PATIENCE):
        made: list[Replica] = []
        for node in nodes:
            layers, bridge = make(), make_bridge()
            parameters = [parameter for layer in layers for parameter in layer.parameters()]
            engine = ZeroEngine(parameters, Adam(), config, node.world, bridge=bridge)
            made.append(Replica(layers, engine, bridge))
        try:
            if is_prepared:
                await asyncio.gather(*(replica.engine.prepare() for replica in made))
            yield made
        finally:
            for replica in made:
                replica.worker.close()
