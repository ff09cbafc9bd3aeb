"""Gradients travel while others are still computed, if they may."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.gradsync.statistics import SyncTraffic
from asyncpar.testing.loop import run_virtual
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import TINY_BUCKETS, Member, members, on_all, train_alone

STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2]


def moved(member: Member) -> int:
    """Return the payload bytes that a rank has sent inside its node."""
    return SyncTraffic.read([member.trainer.groups.inside]).payload_bytes


async def moved_in_a_pass(member: Member) -> tuple[int, int]:
    """Take a step; return the bytes that have moved before the last gradient is final, and in all."""
    before = moved(member)
    async with member.trainer.synchronization() as ready:
        reported: list[str] = []
        member.model.backward(0, member.rank, 0, ready=reported.append)
        for name in reported[:-1]:
            ready(name)
        await asyncio.sleep(5.0)  # the last one takes long
        early = moved(member) - before
        ready(reported[-1])
    await member.trainer.apply_gradients()
    await member.trainer.optimizer_step(0.05)
    return early, moved(member) - before


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_travel_before_the_backward_pass_is_over_if_they_may(overlaps: bool, stage: ZeROStage) -> None:
    async def main() -> None:
        async with members(
            2, 2, stage=stage, overlap_comm_compute=overlaps, gradient_bucket_size_mb=TINY_BUCKETS
        ) as ranks:
            for early, all_in_all in await on_all(ranks, moved_in_a_pass):
                assert early > 0 if overlaps else early == 0
                assert all_in_all > early

    run_virtual(main())


@pytest.mark.parametrize("way", ["trainer", "zero"])
def test_either_setting_keeps_sharded_gradients_at_home(way: str) -> None:
    zero = ZeROConfig(stage=ZeROStage.STAGE2, overlap_comm=way != "zero")

    async def main() -> None:
        async with members(
            2, 2, zero_config=zero, overlap_comm_compute=way != "trainer", gradient_bucket_size_mb=TINY_BUCKETS
        ) as ranks:
            assert [early for early, _ in await on_all(ranks, moved_in_a_pass)] == [0] * 4

    run_virtual(main())


@pytest.mark.parametrize("stage", STAGES)
async def test_gradients_may_be_reported_from_compute_threads(stage: ZeROStage) -> None:
    workers = [WorkerThread(f"compute {rank}") for rank in range(4)]
    threads: set[int] = set()

    async def train(member: Member) -> None:
        def compute(step: int) -> None:
            threads.add(threading.get_ident())
            member.model.backward(step, member.rank, 0, ready=ready)

        for step in range(3):
            async with member.trainer.synchronization() as ready:
                await workers[member.rank].run(compute, step)
            await member.trainer.apply_gradients()
            await member.trainer.optimizer_step(0.05)

    try:
        async with members(2, 2, stage=stage, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
            await on_all(ranks, train)
            expected = train_alone(4, steps=3).values()
            for member in ranks:
                for name, value in member.model.values().items():
                    assert abs(value - expected[name]).max() <= 1e-12
    finally:
        for worker in workers:
            worker.close()
    assert threading.get_ident() not in threads


async def test_the_statistics_tell_how_much_was_hidden() -> None:
    async with members(2, 2, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:

        async def step(member: Member) -> float:
            async with member.trainer.synchronization() as ready:
                member.model.backward(0, member.rank, 0, ready=ready)
                await asyncio.sleep(0.05)
            return member.trainer.get_training_stats().synchronization.overlap_fraction

        assert all(fraction > 0.0 for fraction in await on_all(ranks, step))
