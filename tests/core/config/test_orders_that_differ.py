"""Ranks that number the axes in different orders are notified at once, and go on when they agree."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.three_d import DEFAULT_ORDER
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import Parameter, TransformerConfig
from asyncpar.node import Node
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.testing.world import local_world

SECONDS = 2.0
TINY = TransformerConfig(vocabulary=13, length=6, features=8, layers=2, heads=2)
SHAPES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]


def config_of(shape: tuple[int, int, int], order: str) -> ThreeDParallelismConfig:
    dp, tp, pp = shape
    return ThreeDParallelismConfig(dp_size=dp, tp_size=tp, pp_size=pp, num_layers=2, order=order)


async def synchronize(node: Node, config: ThreeDParallelismConfig) -> None:
    synchronizer = GradientSynchronizer(config, RankMapping(config, node.rank), communicator=node.world)
    parameter = Parameter("weight", np.ones(50, np.float32))
    try:
        async with synchronizer.step([parameter]) as step:
            step.ready("weight")
    finally:
        synchronizer.close()


async def make_groups(node: Node, config: ThreeDParallelismConfig) -> None:
    await ProcessGroups.create(config, node.world)


async def coordinate(node: Node, config: ThreeDParallelismConfig) -> None:
    model = TransformerModel(config=TINY)
    made = await ThreeDParallelismCoordinator.create(HybridConfig(parallelism=config), model, node.world)
    await made.close()


@pytest.mark.parametrize("main", [synchronize, make_groups, coordinate])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_every_rank_learns_who_has_which_order(
    shape: tuple[int, int, int], main: Callable[[Node, ThreeDParallelismConfig], Awaitable[None]]
) -> None:
    other = "-".join(reversed(DEFAULT_ORDER.split("-")))
    size = int(np.prod(shape))
    async with local_world(size) as nodes:
        for odd in {1, size - 1}:
            orders = [other if node.rank == odd else DEFAULT_ORDER for node in nodes]
            runs = (main(node, config_of(shape, order)) for node, order in zip(nodes, orders, strict=True))
            async with asyncio.timeout(20.0):
                errors = await asyncio.gather(*runs, return_exceptions=True)
            for error in errors:
                assert isinstance(error, UsageError), repr(error)
                assert re.search(rf"rank {odd}\b", str(error)), error
                assert re.search(r"ranks? 0\b", str(error)), error
        async with asyncio.timeout(20.0):  # and the group works
            await asyncio.gather(*(main(node, config_of(shape, DEFAULT_ORDER)) for node in nodes))
            assert (await asyncio.gather(*(node.world.all_reduce(np.ones(3)) for node in nodes)))[0][0] == size
