"""Losses of gradients in half precision are sent in the next steps, at any size and number of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Parameter
from asyncpar.testing.world import local_world
from tests.products import sampled

STEPS = 25


async def mean_over_steps(
    gradients: Sequence[np.ndarray], *, strategy: CommunicationStrategy, hosts: list[str] | None, feedback: bool
) -> np.ndarray:
    """Return the mean over all steps of what ranks get of constant gradients."""
    size = len(gradients)
    async with local_world(size, hosts=hosts) as nodes:
        config = ThreeDParallelismConfig(dp_size=size, comm_strategy=strategy)
        compression = GradientCompressionConfig(codec="fp16", error_feedback=feedback)

        async def main(rank: int) -> np.ndarray:
            synchronizer = GradientSynchronizer(
                config, RankMapping(config, rank), communicator=nodes[rank].world, compression=compression
            )
            parameter, total = (
                Parameter("weight", np.zeros(gradients[rank].shape, np.float32)),
                np.zeros(gradients[rank].shape),
            )
            for _ in range(STEPS):
                parameter.grad[...] = gradients[rank]
                async with synchronizer.step([parameter]) as step:
                    step.ready("weight")
                total = total + parameter.grad.astype(np.float64)
            return total / STEPS

        found = await asyncio.gather(*map(main, range(size)))
    assert all((one == found[0]).all() for one in found)
    return found[0]


@pytest.mark.parametrize(
    ("size", "strategy", "hosts"),
    sampled(
        [1e-7, 1e-5],
        [CommunicationStrategy.RING_ALL_REDUCE, CommunicationStrategy.HIERARCHICAL_ALL_REDUCE],
        [None, ["a", "a", "b"]],
    ),
)
async def test_small_gradients_come_through_in_the_course_of_steps(
    size: float, strategy: CommunicationStrategy, hosts: list[str] | None
) -> None:
    """Below 6e-5 float16 has few digits, and below 3e-8 none; a third of that is what each rank sends."""
    drawn = [np.random.default_rng(rank).normal(size=200) * size for rank in range(3)]
    wanted = np.mean(drawn, axis=0)
    found = await mean_over_steps(drawn, strategy=strategy, hosts=hosts, feedback=True)
    assert np.abs(found - wanted).max() < 2.0**-24 / STEPS * 2
    without = await mean_over_steps(drawn, strategy=strategy, hosts=hosts, feedback=False)
    assert np.abs(without - wanted).max() > 2.0**-24 / STEPS * 4
