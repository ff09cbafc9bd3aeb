"""Settings of both configurations do the same thing in every stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.nn.optimizers import SGD
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import RATE, TINY_BUCKETS, Member, Model, members, on_all
from tests.products import sampled

STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2]


async def one_step(nodes: tuple[int, int], micro_steps: int, **settings: Any) -> list[Member]:
    async with members(*nodes, rule=SGD(), **settings) as ranks:
        await on_all(ranks, lambda member: member.step(0, micro_steps=micro_steps))
        return ranks


@pytest.mark.parametrize(
    ("stage", "nodes", "micro_steps", "average"), sampled(STAGES, [(1, 3), (2, 2)], [1, 3], [True, False])
)
async def test_gradients_become_the_mean_or_the_sum_over_ranks(
    stage: ZeROStage, nodes: tuple[int, int], micro_steps: int, average: bool
) -> None:
    """Over micro-steps it is the mean in both cases."""
    ranks = await one_step(nodes, micro_steps, zero_config=ZeROConfig(stage=stage, average=average))
    begun = Model()
    for name, value in begun.values().items():
        place = list(begun.values()).index(name)
        gradients = [
            value - begun.targets((0, rank, micro))[place] for rank in range(len(ranks)) for micro in range(micro_steps)
        ]
        total = np.sum(gradients, axis=0) / micro_steps
        expected = value - RATE * (total / len(ranks) if average else total)
        for member in ranks:
            np.testing.assert_allclose(member.model.values()[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("nodes", [(1, 3), (2, 2)])
async def test_compression_of_either_configuration_makes_fewer_bytes(stage: ZeROStage, nodes: tuple[int, int]) -> None:
    sent: list[int] = []
    for is_compressed in (False, True):
        zero = ZeROConfig(stage=stage, gradient_compression=is_compressed)
        async with members(*nodes, rule=SGD(), dtype="float32", zero_config=zero) as ranks:
            [first, *_] = await on_all(ranks, traffic_of_a_step)
            sent.append(first)
            enabled = ranks[0].trainer.get_training_stats().gradient_compression_enabled
            assert enabled is is_compressed
    assert sent[1] < 0.75 * sent[0], sent


async def traffic_of_a_step(member: Member) -> int:
    """Return the bytes that the trainer's groups send in a step that reduce gradients."""
    groups = member.trainer.groups
    known = [groups.world, *([] if groups.between is None or groups.hosts == 1 else [groups.between])]
    reductions = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")

    def sent() -> int:
        entries = [entry for group in known for entry in group.traffic.operations]
        return sum(entry.payload_bytes for entry in entries if entry.operation in reductions)

    await member.step(0)
    before = sent()
    member.model.backward(1, member.rank, 0)
    member.trainer.update_gradients()
    await member.trainer.synchronize_gradients()
    after = sent()
    await member.trainer.apply_gradients()
    await member.trainer.optimizer_step(RATE)
    return after - before


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("which", ["gradient_bucket_size_mb", "zero_config"])
async def test_the_smaller_bucket_size_counts(stage: ZeROStage, which: str) -> None:
    zero = ZeROConfig(stage=stage, bucket_size_mb=TINY_BUCKETS) if which == "zero_config" else ZeROConfig(stage=stage)
    settings: dict[str, Any] = {} if which == "zero_config" else {which: TINY_BUCKETS}
    async with members(2, 2, rule=SGD(), zero_config=zero, **settings) as ranks:
        await on_all(ranks, lambda member: member.step(0))
        stats = [member.trainer.get_training_stats().synchronization for member in ranks]
    assert [one.total_buckets_synced for one in stats] == [3] * 4
