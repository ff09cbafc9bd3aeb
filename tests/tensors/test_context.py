"""A rank's view of a model that is spread over devices."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.backends import (
    BackendConfig,
    BackendNotRegistered,
    BackendUnavailable,
    CommunicationBackend,
    CommunicationRuntime,
    ThreadBackend,
)
from asyncpar.collectives.arrays import Array
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.tensors import (
    ModelParallelConfig,
    ModelParallelContext,
    ModelParallelStrategy,
    SettingsDiffer,
    TensorCommunicator,
    create_communicator,
)
from asyncpar.testing import run_virtual
from tests.tensors.worlds import draw_tensor, on_world, outcomes

WHOLE = draw_tensor((5, 6), 0)


def config(size: int, **more: Any) -> ModelParallelConfig:
    settings = {"strategy": ModelParallelStrategy.TENSOR, "device_ids": tuple(range(10, 10 + size)), **more}
    return ModelParallelConfig(num_devices=size, **settings)


def test_rank_and_world_size_are_those_of_the_communicator() -> None:
    async def main(c: TensorCommunicator) -> tuple[int, int, int, bool]:
        context = await ModelParallelContext.create(config(c.size), c)
        return context.rank, context.world_size, context.device_id, context.is_master

    assert on_world(3, main) == [(0, 3, 10, True), (1, 3, 11, False), (2, 3, 12, False)]


def test_a_plain_communicator_will_do() -> None:
    async def main(c: TensorCommunicator) -> int:
        return (await ModelParallelContext.create(config(c.size), c.communicator)).rank

    assert on_world(2, main) == [0, 1]


def test_parts_are_those_of_the_own_rank_and_gather_to_the_whole() -> None:
    async def main(c: TensorCommunicator) -> tuple[tuple[int, int], int, list[Array]]:
        context = await ModelParallelContext.create(config(c.size), c)
        part = context.partition_tensor(WHOLE)
        wholes = [await context.all_gather(context.partition_tensor(WHOLE, dim)) for dim in (0, 1)]
        return (part.partition.start_idx, part.partition.end_idx), part.device_id, wholes

    results = on_world(4, main)
    assert [result[0] for result in results] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [result[1] for result in results] == [10, 11, 12, 13]
    for *_, wholes in results:
        for whole in wholes:
            np.testing.assert_array_equal(whole, WHOLE)


def test_a_quarter_of_512_columns_is_the_contracts() -> None:
    async def main(c: TensorCommunicator) -> tuple[int, int, tuple[int, ...]]:
        part = (await ModelParallelContext.create(config(c.size), c)).partition_tensor(np.zeros((128, 512)), 0)
        return part.partition.start_idx, part.partition.end_idx, part.local_shard.shape

    assert on_world(4, main)[0] == (0, 32, (32, 512))


def test_the_dimension_of_the_configuration_is_the_default() -> None:
    async def main(c: TensorCommunicator) -> list[tuple[int, ...]]:
        context = await ModelParallelContext.create(config(c.size, tensor_split_dim=1), c)
        summed = await context.reduce_scatter(WHOLE)
        return [context.partition_tensor(WHOLE).local_shard.shape, summed.local_shard.shape]

    assert on_world(2, main) == [[(5, 3), (5, 3)]] * 2


def test_what_is_reduced_and_scattered_gathers_to_the_sum() -> None:
    async def main(c: TensorCommunicator) -> Array:
        context = await ModelParallelContext.create(config(c.size), c)
        part = await context.reduce_scatter(WHOLE * (c.rank + 1), 0)
        assert part.device_id == context.device_id
        return await context.all_gather(part)

    for got in on_world(4, main):
        np.testing.assert_array_equal(got, WHOLE * 10)


def test_all_reduce_and_broadcast_are_those_of_the_communicator() -> None:
    async def main(c: TensorCommunicator) -> tuple[float, float]:
        context = await ModelParallelContext.create(config(c.size), c)
        total = await context.all_reduce(np.array([c.rank + 1.0]))
        sent = await context.broadcast(np.array([c.rank + 1.0]), root=2)
        return total.item(), sent.item()

    assert on_world(3, main) == [(6.0, 3.0)] * 3


def test_the_groups_along_the_axes_are_real_ones() -> None:
    hybrid = config(4, strategy=ModelParallelStrategy.HYBRID)

    async def main(c: TensorCommunicator) -> tuple[float, float, tuple[int, int]]:
        context = await ModelParallelContext.create(hybrid, c)
        stages = await context.along["pp"].all_reduce(np.array([2.0**c.rank]))
        slices = await context.along["tp"].all_reduce(np.array([2.0**c.rank]))
        return stages.item(), slices.item(), (context.along["pp"].rank, context.along["tp"].rank)

    assert on_world(4, main) == [
        (1 + 4, 1 + 2, (0, 0)),
        (2 + 8, 1 + 2, (0, 1)),
        (1 + 4, 4 + 8, (1, 0)),
        (2 + 8, 4 + 8, (1, 1)),
    ]


# -- bad input --------------------------------------------------------------------------------------------------------


def test_different_configurations_are_an_error_on_all_ranks_that_says_who_has_what() -> None:
    async def main(c: TensorCommunicator) -> None:
        await ModelParallelContext.create(config(3, tensor_split_dim=c.rank // 2), c)

    for error in outcomes(3, main):
        with pytest.raises(SettingsDiffer, match=r"tensor_split_dim is 0 on ranks 0, 1 and 1 on rank 2"):
            raise error


def test_more_devices_than_ranks_are_an_error_on_all_ranks() -> None:
    for error in outcomes(2, lambda c: ModelParallelContext.create(config(4), c)):
        with pytest.raises(UsageError, match="expected as many devices as ranks, 2, got num_devices = 4"):
            raise error


def test_a_plain_array_given_to_one_ranks_all_gather_is_an_error_on_all() -> None:
    async def main(c: TensorCommunicator) -> Any:
        context = await ModelParallelContext.create(config(c.size), c)
        tensor: Any = WHOLE if c.rank == 1 else context.partition_tensor(WHOLE)
        return await context.all_gather(tensor)

    errors = outcomes(3, main)
    assert isinstance(errors[1], UsageError)
    assert all(isinstance(error, PeerCancelled) and error.rank == 1 for error in (errors[0], errors[2]))


# -- backends ---------------------------------------------------------------------------------------------------------


def on_threads(size: int, main: Any, backend: str = "thread") -> list[Any]:
    """Run ``main`` on ranks of this process, each with a runtime that knows where they meet."""

    async def on_all() -> list[Any]:
        meeting = ThreadBackend(size)

        async def one(rank: int) -> Any:
            runtime = CommunicationRuntime()
            runtime.register_backend(backend, meeting)
            return await main(runtime, BackendConfig(rank=rank, world_size=size))

        return await asyncio.gather(*(one(rank) for rank in range(size)))

    return run_virtual(on_all())


@pytest.mark.parametrize("backend", ["thread", "my own"])
def test_a_communicator_is_made_by_the_name_of_its_backend(backend: str) -> None:
    async def main(runtime: CommunicationRuntime, settings: BackendConfig) -> list[int]:
        async with await create_communicator(backend, settings, runtime=runtime) as communicator:
            gathered: list[list[int]] = (await communicator.all_gather(np.array([[communicator.rank]]), 1)).tolist()
            return gathered[0]

    assert on_threads(3, main, backend) == [[0, 1, 2]] * 3


def test_closing_the_communicator_closes_its_backend() -> None:
    async def main(runtime: CommunicationRuntime, settings: BackendConfig) -> None:
        communicator = await create_communicator("thread", settings, runtime=runtime)
        assert runtime.get_group().size == 2
        await communicator.close()
        await communicator.close()
        with pytest.raises(UsageError, match="no backend is open"):
            runtime.get_group()

    on_threads(2, main)


def test_a_context_opens_the_backend_of_its_configuration() -> None:
    async def main(runtime: CommunicationRuntime, settings: BackendConfig) -> int:
        wanted = config(2, comm_backend=CommunicationBackend.THREAD)
        async with ModelParallelContext.open(wanted, settings, runtime=runtime) as context:
            return context.device_id

    assert on_threads(2, main) == [10, 11]


async def test_alone_the_native_backend_is_a_world_of_one() -> None:
    async with ModelParallelContext.open(ModelParallelConfig()) as context:
        assert (context.rank, context.world_size, context.device_id) == (0, 1, 0)
        np.testing.assert_array_equal(await context.all_gather(context.partition_tensor(WHOLE, 1)), WHOLE)


async def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(BackendNotRegistered, match="got 'smoke'"):
        await create_communicator("smoke")


@pytest.mark.parametrize(("backend", "module"), [("mpi", "mpi4py"), ("gloo", "torch")])
async def test_a_missing_library_says_which_extra_to_install(
    backend: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(BackendUnavailable, match=rf'{backend} needs {module}.*pip install "asyncpar\[{backend}\]"'):
        await create_communicator(backend, BackendConfig(rank=0, world_size=1))
