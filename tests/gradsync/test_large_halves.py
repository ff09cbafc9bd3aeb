"""Gradients of 40,000 in float16, or encoded as such, have a mean, although their sum is more than float16 holds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer, HostGroups
from asyncpar.nn import Parameter
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.products import sampled


async def reduce(synchronizer: GradientSynchronizer, model: list[Parameter]) -> None:
    async with synchronizer.step(model) as step:
        for parameter in model:
            step.ready(parameter.name)


KINDS: list[tuple[str, CodecChoice]] = [
    ("float16", "none"),
    ("float32", "fp16"),
    ("float16", "fp16"),
    ("float16", "int8"),
    ("float16", "bf16"),
]
"""Data types of gradients, and how they are encoded."""


@pytest.mark.parametrize(
    ("dtype", "codec", "strategy", "hosts"),
    [(*kind, *more) for kind, *more in sampled(KINDS, list(CommunicationStrategy), [None, ["a", "a", "b"]])],
)
async def test_the_mean_of_large_gradients_is_exact(
    dtype: str, codec: CodecChoice, strategy: CommunicationStrategy, hosts: list[str] | None
) -> None:
    async with local_world(3, hosts=hosts) as nodes:
        config = ThreeDParallelismConfig(dp_size=3, comm_strategy=strategy)
        synchronizers = [
            GradientSynchronizer(
                config,
                RankMapping(config, node.rank),
                communicator=node.world,
                compression=GradientCompressionConfig(codec=codec),
            )
            for node in nodes
        ]
        models = [[Parameter("weight", np.zeros((40, 50), dtype))] for _ in nodes]
        for model in models:
            model[0].grad[...] = 40_000.0
            model[0].grad[0] = -40_000.0
        wanted = models[0][0].grad.copy()
        await asyncio.gather(
            *(reduce(synchronizer, model) for synchronizer, model in zip(synchronizers, models, strict=True))
        )
        for model in models:
            np.testing.assert_allclose(model[0].grad, wanted, rtol=4e-3 if codec == "bf16" else 1e-3)


async def test_the_mean_inside_given_hosts_without_a_codec_is_exact() -> None:
    config = ThreeDParallelismConfig(dp_size=5, comm_strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE)

    async def main(node: Node) -> np.ndarray:
        parameter = Parameter("weight", np.zeros((40, 50), "float16"))
        parameter.grad[...] = 60_000.0 if node.rank % 2 else 50_000.0
        hosts = HostGroups.of(node.world, [(0, 1, 2, 3), (4,)])
        mapping = RankMapping(config, node.rank)
        await reduce(GradientSynchronizer(config, mapping, communicator=node.world, hosts=hosts), [parameter])
        return parameter.grad

    async with local_world(5) as nodes:
        for grad in await asyncio.gather(*map(main, nodes)):
            np.testing.assert_allclose(grad.astype(np.float64), 54_000.0, rtol=1e-3)
