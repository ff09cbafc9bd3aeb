"""The memory that sharded training reports is what numpy gave it, compressed or not, in every stage."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.nn import Parameter
from asyncpar.nn.optimizers import Adam
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from tests.held import held_arrays
from tests.zero.replicas import PATIENCE, on_all

SHAPES = {"table": (256, 128), "weight": (128, 200), "bias": (4096,)}


async def train(engine: ZeroEngine) -> None:
    for _ in range(2):
        engine.zero_grad()
        for parameter in engine.parameters:
            parameter.accumulate(np.ones(parameter.shape, np.float32))
        await engine.reduce()
        await engine.step(0.1)
    engine.zero_grad()


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_all_that_is_held_is_told(stage: ZeROStage, is_compressed: bool) -> None:
    config: dict[str, Any] = {"stage": stage, "gradient_compression": is_compressed, "bucket_size_mb": 0.1}
    async with local_world(3) as nodes, asyncio.timeout(PATIENCE):
        with held_arrays() as held:
            made = [
                ZeroEngine(
                    [Parameter(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()],
                    Adam(),
                    ZeROConfig(**config),
                    node.world,
                )
                for node in nodes
            ]
            await on_all(made, lambda engine: engine.prepare())
            needed = [engine.memory_needed() for engine in made]
            await on_all(made, train)
        stats = [engine.memory_stats() for engine in made]
        assert sum(each.total for each in stats) == pytest.approx(held.nbytes, rel=0.02)
        for each, known in zip(stats, needed, strict=True):
            assert (each.residuals > 0) is is_compressed
            assert known >= each.kept + each.transient_peak, "what it takes is known before the first step"
