"""A failure of one rank fails all, at once and by name; and then training can go on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from asyncpar.errors import AsyncparError, PeerCancelled, PeerError, PeerTimeout
from asyncpar.multinode import MultiNodeTrainer
from asyncpar.testing.loop import run_virtual
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import (
    RULE,
    TINY_BUCKETS,
    Member,
    Model,
    config_of,
    members,
    on_all,
    on_all_failing,
    train_alone,
)
from tests.products import in_turn, sampled

STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2]


class Spilled(Exception):
    """What goes wrong in a backward pass."""


def assert_trains_on(ranks: list[Member], *, before: int = 0) -> None:
    """After ``before`` steps, and one more just made, ranks are where one process is."""
    expected = train_alone(len(ranks), steps=before + 1).values()
    for member in ranks:
        for name, value in member.model.values().items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12)


def assert_unmoved(ranks: list[Member]) -> None:
    """All ranks still have the values that they began with."""
    for member in ranks:
        for name, value in member.model.values().items():
            assert value.tobytes() == Model().values()[name].tobytes(), f"{name} on rank {member.rank}"


async def outcomes(ranks: list[Member], *, culprit: int, after: int) -> list[object]:
    """Return what each rank raises in a step whose backward pass fails on one rank after some parameters."""

    async def main(member: Member) -> None:
        async with member.trainer.synchronization() as ready:
            if member.rank == culprit:
                reported: list[str] = []

                def report(name: str) -> None:
                    ready(name)
                    reported.append(name)
                    if len(reported) == after:
                        raise Spilled

                if not after:
                    raise Spilled
                member.model.backward(0, member.rank, 0, ready=report)
            member.model.backward(0, member.rank, 0, ready=ready)
        await member.trainer.apply_gradients()
        await member.trainer.optimizer_step(1.0)

    return list(await asyncio.gather(*(main(member) for member in ranks), return_exceptions=True))


@pytest.mark.parametrize(("culprit", "after", "stage"), sampled([0, 1, 2], [0, 2, 4], STAGES))
def test_a_backward_pass_that_fails_ends_the_step_on_all_ranks_and_the_next_one_works(
    culprit: int, after: int, stage: ZeROStage
) -> None:
    async def main() -> None:
        async with members(2, 2, stage=stage, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
            results = await outcomes(ranks, culprit=culprit, after=after)
            assert isinstance(results[culprit], Spilled)
            others = [result for rank, result in enumerate(results) if rank != culprit]
            assert all(isinstance(result, PeerCancelled) for result in others), results
            assert_unmoved(ranks)
            await on_all(ranks, lambda member: member.step(0))
            assert_trains_on(ranks)
        assert asyncio.get_running_loop().time() < 5.0, "nobody waited for a timeout"

    run_virtual(main())


@pytest.mark.parametrize(("culprit", "stage"), in_turn([0, 1, 3], STAGES))
def test_a_rank_that_is_cancelled_ends_the_step_on_all_ranks_and_the_next_one_works(
    culprit: int, stage: ZeROStage
) -> None:
    async def main() -> None:
        async with members(2, 2, stage=stage, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
            await on_all(ranks, lambda member: member.step(0))
            for member in ranks:
                member.model.backward(1, member.rank, 0)
                member.trainer.update_gradients()
            late = ranks[(culprit + 2) % 4]  # the others wait for it, so none can be through
            waiting = [
                asyncio.create_task(member.trainer.synchronize_gradients()) for member in ranks if member is not late
            ]
            await asyncio.sleep(0.1)
            place = [member for member in ranks if member is not late].index(ranks[culprit])
            waiting[place].cancel()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(results[place], asyncio.CancelledError)
            assert all(isinstance(result, AsyncparError) for result in results if result is not results[place])
            with pytest.raises(PeerError):
                await late.trainer.synchronize_gradients()
            await on_all(ranks, lambda member: member.step(1))
            assert_trains_on(ranks, before=1)
        assert asyncio.get_running_loop().time() < 5.0, "nobody waited for a timeout"

    run_virtual(main())


@pytest.mark.parametrize(("missing", "stage"), in_turn([0, 1, 3], STAGES))
def test_a_rank_that_never_comes_is_named_when_time_is_up(missing: int, stage: ZeROStage) -> None:
    async def main() -> None:
        async with members(2, 2, stage=stage) as ranks:
            for member in ranks:
                member.trainer.groups.world.timeout = 3.0
                member.model.backward(0, member.rank, 0)
                member.trainer.update_gradients()
            present = [member for member in ranks if member.rank != missing]
            results = await asyncio.gather(
                *(member.trainer.synchronize_gradients() for member in present), return_exceptions=True
            )
            assert all(isinstance(result, PeerError) for result in results), results
            late = [str(result) for result in results if isinstance(result, PeerTimeout)]
            assert late, results
            assert all(f"rank {missing}" in text for text in late), results

    run_virtual(main())


def test_beginning_without_all_ranks_times_out_and_names_who_is_missing() -> None:
    async def main() -> None:
        async with members(1, 3) as ranks:
            world = [member.trainer.groups.world for member in ranks]
            world[0].timeout = 2.0
            trainer = MultiNodeTrainer(config_of(0, 1, 3), RULE, communicator=world[0], name="another")
            with pytest.raises(PeerTimeout, match="rank 0: all_gather"):
                await trainer.initialize_environment()

    run_virtual(main())


def test_an_optimizer_step_that_a_rank_does_not_take_raises_on_the_others() -> None:
    async def main() -> None:
        async with members(2, 2, stage=ZeROStage.STAGE1) as ranks:

            async def step(member: Member) -> None:
                member.model.backward(0, member.rank, 0)
                member.trainer.update_gradients()
                await member.trainer.synchronize_gradients()
                await member.trainer.apply_gradients()
                if member.rank == 3:
                    async with asyncio.timeout(0):
                        await member.trainer.optimizer_step(0.05)
                await member.trainer.optimizer_step(0.05)

            results = await asyncio.gather(*(step(member) for member in ranks), return_exceptions=True)
            assert isinstance(results[3], TimeoutError)
            assert all(isinstance(result, PeerCancelled) for result in results[:3]), results
            assert_unmoved(ranks)
            await on_all(ranks, lambda member: member.step(0))
            assert_trains_on(ranks)

    run_virtual(main())


async def test_what_a_failed_step_had_taken_in_is_forgotten() -> None:
    async with members(1, 2) as ranks:
        for member in ranks:
            member.model.backward(9, 9, 9)
            member.trainer.update_gradients()
        results = await outcomes(ranks, culprit=1, after=1)
        assert all(isinstance(result, BaseException) for result in results)
        assert [member.trainer.get_memory_usage().accumulation for member in ranks] == [0, 0]
        await on_all(ranks, lambda member: member.step(0))
        assert_trains_on(ranks)


async def test_finalizing_in_the_middle_of_a_step_waits_for_no_rank() -> None:
    async with members(1, 2) as ranks:
        model: Model = ranks[0].model
        model.backward(0, 0, 0)
        ranks[0].trainer.update_gradients()
        async with asyncio.timeout(30.0):  # the timeout of operations is longer
            await ranks[0].trainer.finalize()


@pytest.mark.parametrize("is_local", [True, False], ids=["before a step", "in the middle of one"])
@pytest.mark.parametrize("stage", STAGES)
async def test_an_error_that_leaves_the_block_of_one_rank_is_the_reason_of_the_others(
    stage: ZeROStage, is_local: bool
) -> None:
    async def main(member: Member) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_exit(member.trainer)  # which has begun
            await member.step(0)
            if not is_local:
                member.model.backward(1, member.rank, 0)
                member.trainer.update_gradients()
                await member.trainer.synchronize_gradients()
            if member.rank == 1:
                raise Spilled("no batch left")
            if not is_local:
                await member.trainer.apply_gradients()
                await member.trainer.optimizer_step(1.0)
            await member.step(2)

    async with asyncio.timeout(60.0), members(2, 2, zero_config=ZeROConfig(stage=stage)) as ranks:
        errors = await on_all_failing(ranks, main)
    assert isinstance(errors.pop(1), Spilled)
    for error in errors:
        assert isinstance(error, PeerCancelled)
        assert error.rank == 1
        assert "no batch left" in str(error)
