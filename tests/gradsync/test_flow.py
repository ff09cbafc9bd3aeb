"""Buckets too large for the loop go the same way as others."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.core.concurrency.tasks import INLINE_BYTES
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import (
    GradientCompressionConfig,
    GradientSynchronizer,
)
from asyncpar.nn import Array, Parameter
from asyncpar.node import Node
from asyncpar.testing.world import local_world

LARGE = INLINE_BYTES  # values of four bytes: four times what is done inline


def make_parameter(rank: int) -> Parameter:
    parameter = Parameter("large", np.zeros(LARGE, np.float32))
    parameter.grad[:] = np.random.default_rng(rank).normal(size=LARGE)
    return parameter


@pytest.mark.parametrize("lossy", [False, True])
async def test_large_buckets_become_the_mean_too(lossy: bool) -> None:
    async def main(node: Node) -> Array:
        config = ThreeDParallelismConfig(dp_size=node.size)
        synchronizer = GradientSynchronizer(
            config,
            RankMapping(config, node.rank),
            communicator=node.world,
            compression=GradientCompressionConfig(codec="int8" if lossy else None),
        )
        parameter = make_parameter(node.rank)
        async with synchronizer.step([parameter]):
            pass
        return parameter.grad

    async with local_world(3) as nodes:
        results = await asyncio.gather(*(main(node) for node in nodes))
    expected = np.mean([make_parameter(rank).grad for rank in range(3)], axis=0)
    np.testing.assert_allclose(results[0], expected, atol=0.05 if lossy else 1e-6)
    for other in results:
        np.testing.assert_array_equal(other, results[0])
