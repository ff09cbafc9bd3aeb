"""From nothing to replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncpar.backends import (
    BackendConfig,
    BackendNotRegistered,
    CommunicationBackend,
    CommunicationRuntime,
    ThreadBackend,
)
from asyncpar.errors import UsageError
from asyncpar.nn import Array
from asyncpar.parallel import (
    DDP_GROUP,
    SynchronizationMode,
    create_distributed_data_parallel,
    init_process_group,
)
from tests.parallel.replicas import assert_equal_bits, descend, make_batch, make_model, train_step, values_of


async def test_alone_a_group_of_one_is_made() -> None:
    runtime, group = await init_process_group()
    try:
        assert (group.name, group.rank, group.size, group.backend) == (DDP_GROUP, 0, 1, "native")
        assert runtime.get_group(DDP_GROUP) is group
    finally:
        await runtime.finalize()


async def test_another_place_than_the_environment_says_is_refused() -> None:
    with pytest.raises(UsageError, match="rank: expected 0"):
        await init_process_group(rank=1, world_size=2)


async def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BackendNotRegistered, match="'nothing'"):
        await init_process_group("nothing")


@pytest.mark.parametrize("mode", [SynchronizationMode.SYNCHRONOUS, SynchronizationMode.BOUNDED_STALENESS(1)], ids=str)
async def test_ranks_of_this_process_train_together(mode: SynchronizationMode) -> None:
    backend = ThreadBackend(3)

    async def main(rank: int) -> dict[str, Array]:
        runtime = CommunicationRuntime()
        runtime.register_backend(CommunicationBackend.THREAD, backend)
        async with runtime:
            await init_process_group(
                CommunicationBackend.THREAD, rank, 3, runtime=runtime, config=BackendConfig(timeout=10.0)
            )
            model = make_model(seed=rank)
            async with await create_distributed_data_parallel(model, runtime=runtime, mode=mode) as ddp:
                assert (ddp.rank(), ddp.world_size(), str(ddp.process_group())) == (rank, 3, DDP_GROUP)
                await train_step(ddp, *make_batch(2, seed=rank))
                await ddp.update(lambda: descend(model))
            return values_of(model)

    assert_equal_bits(await asyncio.gather(*(main(rank) for rank in range(3))))


async def test_a_replica_that_opened_its_backend_closes_it() -> None:
    model = make_model()
    async with await create_distributed_data_parallel(model) as ddp:
        await train_step(ddp, *make_batch(2))
        assert ddp.runtime.groups == (DDP_GROUP,)
    assert len(ddp.runtime.groups) == 0


async def test_a_replica_that_cannot_be_leaves_nothing_open() -> None:
    runtime = CommunicationRuntime()
    with pytest.raises(UsageError, match="no backend is open"):
        await create_distributed_data_parallel(make_model(), runtime=runtime)
    with pytest.raises(UsageError, match="bucket_size"):
        await create_distributed_data_parallel(make_model(), bucket_size=0)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"backend": "gloo"}, "backend: expected 'native', which the runtime has, or None, got 'gloo'"),
        ({"rank": 1}, "rank: expected 0"),
        ({"world_size": 2}, "world_size: expected 1"),
    ],
)
async def test_another_place_than_the_runtime_has_is_refused(wanted: dict[str, Any], message: str) -> None:
    runtime, _ = await init_process_group()
    async with runtime:
        with pytest.raises(UsageError, match=f"^{message}"):
            await create_distributed_data_parallel(make_model(), runtime=runtime, **wanted)
        ddp = await create_distributed_data_parallel(
            make_model(), runtime=runtime, backend="native", rank=0, world_size=1
        )
        await ddp.close()


async def test_two_different_places_are_refused() -> None:
    with pytest.raises(UsageError, match="rank: expected 0, as in config, got 1"):
        await init_process_group("thread", 1, 2, config=BackendConfig(rank=0, world_size=2))
