"""Groups that the hierarchical strategy takes for hosts, whatever hosts ranks are on."""

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

VALUES = 600


def halves(node: Node) -> HostGroups:
    """Return the groups of this rank of four, in two halves."""
    own = (0, 1) if node.rank < 2 else (2, 3)
    inside = node.world.subgroup(own, key="half")
    assert inside is not None
    between = node.world.subgroup((0, 2), key="firsts") if node.rank in (0, 2) else None
    return HostGroups(world=node.world, inside=inside, between=between, hosts=2)


async def mean_of(
    node: Node, groups: HostGroups, *, strategy: CommunicationStrategy, codec: CodecChoice | None
) -> tuple[bytes, float, int]:
    """Return the mean's bits, its largest error, and how many bytes went between the halves."""
    config = ThreeDParallelismConfig(dp_size=4, comm_strategy=strategy)
    synchronizer = GradientSynchronizer(
        config,
        RankMapping(config, node.rank),
        communicator=node.world,
        compression=GradientCompressionConfig(codec=codec),
        hosts=groups,
    )
    drawn = [np.random.default_rng(rank).normal(size=VALUES).astype(np.float32) for rank in range(4)]
    parameter = Parameter("weight", np.zeros(VALUES, np.float32))
    parameter.grad[:] = drawn[node.rank]
    async with synchronizer.step([parameter]):
        pass
    error = float(np.abs(parameter.grad - np.mean(np.array(drawn, np.float64), axis=0)).max())
    return parameter.grad.tobytes(), error, 0 if groups.between is None else groups.between.traffic.payload_bytes


@pytest.mark.parametrize(("codec", "error", "sent"), [(None, 1e-6, 4 * VALUES), ("int8", 0.05, 1.2 * VALUES)])
async def test_gradients_are_reduced_inside_given_groups_and_between_their_first_ranks(
    codec: CodecChoice | None, error: float, sent: float
) -> None:
    async with local_world(4) as nodes:
        results = await asyncio.gather(
            *(
                mean_of(node, halves(node), strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE, codec=codec)
                for node in nodes
            )
        )
    assert len({bits for bits, _, _ in results}) == 1
    assert max(found for _, found, _ in results) < error
    assert [nbytes > 0 for _, _, nbytes in results] == [True, False, True, False]
    assert max(nbytes for _, _, nbytes in results) <= sent


async def test_other_strategies_have_no_use_for_groups() -> None:
    async with local_world(4) as nodes:
        results = await asyncio.gather(
            *(mean_of(node, halves(node), strategy=CommunicationStrategy.RING_ALL_REDUCE, codec=None) for node in nodes)
        )
    assert max(found for _, found, _ in results) < 1e-6
    assert [nbytes for _, _, nbytes in results] == [0] * 4
