"""Sums of values of two bytes: many of them add up as in float32, wherever gradients of micro-steps are added."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.multinode import GradientSyncBuffer, MultiNodeConfig, MultiNodeTrainer
from asyncpar.nn import Parameter
from asyncpar.nn.half import HalfParameter
from asyncpar.nn.optimizers import SGD
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage
from tests.soak import chosen

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)

CASES = (
    pytest.param(BFLOAT16, 1.0, 300, id="past the precision of bfloat16"),
    pytest.param(BFLOAT16, 1.0, chosen(600, soak=1000), id="far past it"),
    pytest.param(FLOAT16, 40_000.0, 2, id="past the range of float16"),
    pytest.param(FLOAT16, 1.0, chosen(2500, soak=4000), id="past the precision of float16"),
)

Mean = Callable[[Communicator, np.dtype[Any], float, int], Awaitable[Any]]
"""Returns the mean over ``count`` micro-steps of gradients of a dtype, each of which is a value."""


async def by_synchronizer(world: Communicator, dtype: np.dtype[Any], value: float, count: int) -> Any:
    synchronizer = GradientSynchronizer.data_parallel(world)
    return await synchronized(synchronizer, dtype, value, count)


async def by_synchronizer_with_codec(world: Communicator, dtype: np.dtype[Any], value: float, count: int) -> Any:
    compression = GradientCompressionConfig(codec="int8")
    synchronizer = GradientSynchronizer.data_parallel(world, compression=compression)
    return await synchronized(synchronizer, dtype, value, count)


async def synchronized(synchronizer: GradientSynchronizer, dtype: np.dtype[Any], value: float, count: int) -> Any:
    gradients = {"w": np.zeros(8, dtype)}
    for micro_step in range(count):
        gradients["w"][...] = value
        if micro_step < count - 1:
            synchronizer.accumulate(gradients)
    await synchronizer.synchronize_gradients(gradients)
    assert gradients["w"].dtype == dtype
    return gradients["w"]


def half(dtype: np.dtype[Any], value: float = 0.0) -> HalfParameter:
    return HalfParameter("w", np.full(8, value, np.float32), storage=dtype)


async def by_parameter(world: Communicator, dtype: np.dtype[Any], value: float, count: int) -> Any:
    parameter = half(dtype)
    for _ in range(count):
        parameter.accumulate(np.full(8, value, np.float32))
    parameter.scale_grad(1 / count)
    return parameter.grad


def zero(stage: ZeROStage) -> Mean:
    async def by_zero(world: Communicator, dtype: np.dtype[Any], value: float, count: int) -> Any:
        parameter = half(dtype)
        optimizer = ZeROOptimizer(SGD(), ZeROConfig(stage=stage), world, learning_rate=1.0)
        await optimizer.register_parameters([parameter])
        for _ in range(count):
            optimizer.accumulate_grad("w", np.full(8, value, np.float32))
        optimizer.apply_accumulated_grads(count)
        await optimizer.optimizer_step()
        if stage.shards_parameters:
            await optimizer.gather_parameters()
        return -parameter.value.copy()

    return by_zero


def reduced_in_each_micro_step(stage: ZeROStage) -> Mean:
    """Return a mean that is reduced again and again, as pipelines do from stage 2 on."""

    async def by_engine(world: Communicator, dtype: np.dtype[Any], value: float, count: int) -> Any:
        parameter = half(dtype)
        optimizer = ZeROOptimizer(SGD(), ZeROConfig(stage=stage), world, learning_rate=1.0)
        await optimizer.register_parameters([parameter])
        for _ in range(count):
            parameter.grad[...] = value
            await optimizer.engine.reduce()
        optimizer.engine.scale(1 / count)
        await optimizer.engine.step(1.0)
        if stage.shards_parameters:
            await optimizer.gather_parameters()
        return -parameter.value.copy()

    return by_engine


def multinode(stage: ZeROStage) -> Mean:
    async def by_trainer(world: Communicator, dtype: np.dtype[Any], value: float, count: int) -> Any:
        parameter = half(dtype)
        config = MultiNodeConfig(
            num_nodes=world.size,
            devices_per_node=1,
            node_rank=world.rank,
            global_rank=world.rank,
            zero_config=ZeROConfig(stage=stage),
        )
        async with MultiNodeTrainer(config, SGD(), communicator=world) as trainer:
            await trainer.register_parameters([parameter])
            for _ in range(count):
                trainer.update_gradients({"w": np.full(8, value, np.float32)})
            await trainer.synchronize_gradients()
            await trainer.apply_gradients(count)
            await trainer.optimizer_step(1.0)
            return -parameter.value.copy()

    return by_trainer


MEANS: dict[str, Mean] = {
    "GradientSynchronizer": by_synchronizer,
    "GradientSynchronizer with int8": by_synchronizer_with_codec,
    "HalfParameter": by_parameter,
    **{f"ZeROOptimizer {stage.name}": zero(stage) for stage in ZeROStage},
    **{f"ZeroEngine {stage.name}": reduced_in_each_micro_step(stage) for stage in (ZeROStage.STAGE2, ZeROStage.STAGE3)},
    **{f"MultiNodeTrainer {stage.name}": multinode(stage) for stage in (ZeROStage.STAGE1, ZeROStage.STAGE2)},
}


@pytest.mark.parametrize(("dtype", "value", "count"), CASES)
@pytest.mark.parametrize("of", MEANS)
async def test_equal_gradients_have_themselves_as_their_mean(
    of: str, dtype: np.dtype[Any], value: float, count: int
) -> None:
    if of.startswith("ZeroEngine"):
        count = min(count, 300)  # a collective each
    async with local_world(1) as (node,):
        mean = await MEANS[of](node.world, dtype, value, count)
    np.testing.assert_allclose(np.asarray(mean, np.float32), value, rtol=2**-8)


async def test_two_ranks_get_the_mean_of_many_micro_steps() -> None:
    async with local_world(2) as nodes:
        makes = [by_synchronizer(node.world, BFLOAT16, 1.0 + node.rank, 300) for node in nodes]
        for mean in await asyncio.gather(*makes):
            np.testing.assert_array_equal(mean.astype(np.float32), 1.5)


@pytest.mark.parametrize(("dtype", "value", "count"), CASES)
def test_a_buffer_has_the_mean_in_the_dtype_of_its_gradients(dtype: np.dtype[Any], value: float, count: int) -> None:
    if dtype != FLOAT16:
        pytest.skip("it takes dtypes that numpy knows as floating")
    buffer = GradientSyncBuffer()
    for _ in range(count):
        buffer.add_gradient("w", np.full(8, value, dtype))
    mean = buffer.average_gradients()["w"]
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, dtype.type(value))


def test_a_gradient_that_is_read_in_between_is_rounded_and_goes_on() -> None:
    parameter = half(BFLOAT16)
    for _ in range(3):
        parameter.accumulate(np.full(8, 1.0, np.float32))
        parameter.accumulate(np.full(2, 2.0, np.float32), slice(2, 4))
    np.testing.assert_array_equal(parameter.grad.astype(np.float32), [3, 3, 9, 9, 3, 3, 3, 3])
    parameter.accumulate(1.0)
    np.testing.assert_array_equal(parameter.grad.astype(np.float32), [4, 4, 10, 10, 4, 4, 4, 4])
    parameter.zero_grad()
    assert not parameter.grad.any()
    parameter.accumulate(1.0)
    parameter.accumulate(1.0)
    parameter.release_grad()
    assert not parameter.grad.any()
    assert Parameter("s", np.zeros(2, np.float16)).dtype == FLOAT16
