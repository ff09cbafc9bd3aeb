"""Sub-groups are what they are called, and carry what they should."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.gradsync import HostGroups
from asyncpar.gradsync.statistics import SyncTraffic
from asyncpar.multinode import MultiNodeTrainer
from asyncpar.node import Node
from asyncpar.zero import ZeROStage
from tests.multinode.worlds import RULE, TINY_BUCKETS, Member, Model, config_of, members, node_world, on_all

STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2]


@pytest.mark.parametrize(
    ("world", "nodes", "leaders"),
    [
        ((2, 2), [(0, 1), (0, 1), (2, 3), (2, 3)], (0, 2)),
        ((3, 2), [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)], (0, 2, 4)),
        ((1, 3), [(0, 1, 2)] * 3, (0,)),
        ((3, 1), [(0,), (1,), (2,)], (0, 1, 2)),
        ((1, 1), [(0,)], (0,)),
    ],
)
async def test_nodes_and_leaders_are_groups_of_their_own(
    world: tuple[int, int], nodes: list[tuple[int, ...]], leaders: tuple[int, ...]
) -> None:
    async with members(*world) as ranks:
        groups = [member.trainer.groups for member in ranks]
    assert [one.inside.ranks for one in groups] == nodes
    assert [one.between.ranks for one in groups if one.between is not None] == [leaders] * len(leaders)
    assert [member.rank for member, one in zip(ranks, groups, strict=True) if one.between is not None] == list(leaders)
    assert all(one.world.size == len(ranks) for one in groups)


async def test_a_sum_inside_a_node_is_that_of_the_node() -> None:
    async with node_world(2, 2) as nodes:

        async def main(node: Node) -> float:
            groups = HostGroups.of(node.world, config_of(node.rank, 2, 2).nodes())
            return float((await groups.inside.all_reduce(np.array([10.0**node.rank])))[0])

        assert await on_all(nodes, main) == [11.0, 11.0, 1100.0, 1100.0]


def sent(member: Member) -> dict[str, int]:
    """Return the payload bytes that a rank has sent, by group."""
    groups = member.trainer.groups
    leaders = [] if groups.between is None else [groups.between]
    named = {"world": [groups.world], "node": [groups.inside], "leaders": leaders}
    return {name: SyncTraffic.read(communicators).payload_bytes for name, communicators in named.items()}


async def sent_in_a_step(member: Member, *, micro_steps: int = 1) -> dict[str, int]:
    await member.step(0)
    before = sent(member)
    await member.step(1, micro_steps=micro_steps)
    return {name: nbytes - before[name] for name, nbytes in sent(member).items()}


async def test_gradients_leave_a_node_through_its_first_rank_alone_and_once() -> None:
    async with members(2, 2) as ranks:
        counts = await on_all(ranks, lambda member: sent_in_a_step(member, micro_steps=4))
    gradients = 8 * 108
    assert [count["leaders"] for count in counts] == [gradients, 0, gradients, 0]
    assert all(count["world"] < 300 for count in counts), "hashes and flags only"
    assert all(count["node"] >= gradients / 2 for count in counts)


@pytest.mark.parametrize("stage", [ZeROStage.STAGE1, ZeROStage.STAGE2])
async def test_owners_of_a_node_get_their_gradients_through_its_first_rank(stage: ZeROStage) -> None:
    async with members(2, 2, stage=stage) as ranks:
        counts = await on_all(ranks, sent_in_a_step)
    values = 8 * 4 * 31  # 35, 66, 6 and 1 values, padded to rows of 9 + 17 + 2 + 1 and so on
    assert [count["leaders"] > 0 for count in counts] == [True, False, True, False]
    assert all(count["leaders"] <= values / 2 for count in counts)


async def test_buckets_are_as_large_as_asked_for() -> None:
    buckets = {}
    for size in (TINY_BUCKETS, 25.0):
        async with members(2, 2, gradient_bucket_size_mb=size) as ranks:
            await on_all(ranks, lambda member: member.step(0))
            stats = ranks[0].trainer.get_training_stats()
        buckets[size] = stats.synchronization.total_buckets_synced
    assert buckets == {TINY_BUCKETS: 3, 25.0: 1}


async def test_nodes_need_not_be_hosts_of_their_own() -> None:
    async with node_world(1, 4) as nodes:

        async def main(node: Node) -> tuple[int, ...]:
            trainer = MultiNodeTrainer(config_of(node.rank, 2, 2), RULE, communicator=node.world)
            async with trainer:
                await trainer.register_parameters(Model().parameters)
                return trainer.groups.inside.ranks

        assert await on_all(nodes, main) == [(0, 1), (0, 1), (2, 3), (2, 3)]
