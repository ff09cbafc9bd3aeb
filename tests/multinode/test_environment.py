"""A trainer finds its world in the environment or takes the one it is given."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.backends import BackendConfig, BackendNotRegistered, CommunicationRuntime, ThreadBackend
from asyncpar.errors import UsageError
from asyncpar.multinode import MultiNodeTrainer
from tests.multinode.worlds import PATIENCE, RULE, Member, Model, config_of, on_all, train_alone


def runtimes(size: int, name: str) -> list[CommunicationRuntime]:
    """Return a runtime per rank; the ranks meet in one thread backend called ``name``."""
    backend = ThreadBackend(size)
    made = [CommunicationRuntime() for _ in range(size)]
    for runtime in made:
        runtime.register_backend(name, backend)
    return made


async def test_a_trainer_opens_the_backend_of_its_configuration() -> None:
    opened = runtimes(4, "ours")
    made = [
        Member(MultiNodeTrainer(config_of(rank, 2, 2, comm_backend="ours"), RULE, runtime=opened[rank]), Model())
        for rank in range(4)
    ]

    async def main(member: Member) -> str:
        async with member.trainer as trainer:
            await trainer.register_parameters(member.model.parameters)
            await member.train(2)
            await trainer.barrier()
            return opened[member.rank].get_group().backend

    async with asyncio.timeout(PATIENCE):
        assert await on_all(made, main) == ["ours"] * 4
    expected = train_alone(4, steps=2).values()
    for member in made:
        for name, value in member.model.values().items():
            assert abs(value - expected[name]).max() <= 1e-12
    for runtime in opened:
        assert runtime.get_group().size == 4, "a runtime that was given stays open"
        await runtime.finalize()


async def test_a_world_of_one_needs_nothing() -> None:
    async with MultiNodeTrainer(config_of(0, 1, 1), RULE) as trainer:
        member = Member(trainer, Model())
        await trainer.register_parameters(member.model.parameters)
        await member.train(3, micro_steps=2)
    expected = train_alone(1, steps=3, micro_steps=2).values()
    for name, value in member.model.values().items():
        assert abs(value - expected[name]).max() <= 1e-12
    with pytest.raises(UsageError, match="after finalize"):
        _ = trainer.groups


async def test_an_unknown_backend_is_refused() -> None:
    trainer = MultiNodeTrainer(config_of(0, 1, 1, comm_backend="pigeon"), RULE)
    with pytest.raises(BackendNotRegistered, match="got 'pigeon'"):
        await trainer.initialize_environment()


async def test_a_place_that_is_not_that_of_this_process_is_refused() -> None:
    trainer = MultiNodeTrainer(config_of(1, 2, 1), RULE)
    with pytest.raises(UsageError, match="expected 0, which is what the native backend was started with here, got 1"):
        await trainer.initialize_environment()


async def test_settings_reach_the_backend() -> None:
    trainer = MultiNodeTrainer(config_of(0, 1, 1), RULE, backend=BackendConfig(timeout=7.0))
    async with trainer:
        assert trainer.groups.world.timeout == 7.0


async def test_all_wait_at_a_barrier() -> None:
    opened = runtimes(2, "ours")
    arrived: list[int] = []

    async def main(rank: int) -> list[int]:
        trainer = MultiNodeTrainer(config_of(rank, 1, 2, comm_backend="ours"), RULE, runtime=opened[rank])
        async with trainer:
            for _ in range(20 * rank):
                await asyncio.sleep(0)
            arrived.append(rank)
            await trainer.barrier()
            return list(arrived)

    async with asyncio.timeout(PATIENCE):
        assert await on_all([0, 1], main) == [[0, 1], [0, 1]]
    for runtime in opened:
        await runtime.finalize()
