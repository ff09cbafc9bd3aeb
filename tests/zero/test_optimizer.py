"""The optimizer as a training loop of one's own sees it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn import Array, Initializer, Linear
from asyncpar.nn.optimizers import SGD, Adam, Optimizer, Rule
from asyncpar.tensors.config import ModelParallelConfig
from asyncpar.tensors.context import ModelParallelContext
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage
from asyncpar.zero.parameter_gatherer import ShardedStage
from tests.zero.replicas import (
    PATIENCE,
    SHAPES,
    draw_gradient,
    draw_parameters,
    on_all,
    outcomes,
    whole_values,
)

STAGES = list(ZeROStage)


@asynccontextmanager
async def optimizers(
    size: int, stage: ZeROStage, rule: Rule | None = None, *, is_registered: bool = True, **settings: Any
) -> AsyncIterator[list[ZeROOptimizer]]:
    async with local_world(size) as nodes, asyncio.timeout(PATIENCE):
        config = ZeROConfig(stage=stage)
        made = [ZeROOptimizer(rule or SGD(), config, node.world, **settings) for node in nodes]
        if is_registered:
            await on_all(made, lambda optimizer: optimizer.register_parameters(draw_parameters()))
        yield made


def rank_of(optimizer: ZeROOptimizer) -> int:
    return optimizer.engine.communicator.rank


def gradients_of(rank: int, step: int) -> dict[str, Array]:
    return {name: draw_gradient(name, shape, rank=rank, step=step) for name, shape in SHAPES.items()}


async def values_of(made: Sequence[ZeROOptimizer]) -> list[dict[str, Array]]:
    return await on_all([optimizer.engine for optimizer in made], whole_values)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_step_is_that_of_the_mean_gradient_clipped(stage: ZeROStage) -> None:
    parameters = draw_parameters()
    whole = Optimizer(parameters, Adam())
    async with optimizers(3, stage, Adam(), learning_rate=0.05, clip_norm=0.5) as made:
        for step in range(2):
            for optimizer in made:
                optimizer.update_gradients(gradients_of(rank_of(optimizer), step))
            norms = await on_all(made, ZeROOptimizer.optimizer_step)
            for parameter in parameters:
                drawn = [draw_gradient(parameter.name, parameter.shape, rank=rank, step=step) for rank in range(3)]
                parameter.grad = np.mean(drawn, axis=0).astype(np.float32)
            norm = math.sqrt(whole.squared_norm())
            assert norms == [pytest.approx(norm, rel=1e-6)] * 3
            whole.scale(0.5 / norm)
            whole.step(0.05)
        for values in await values_of(made):
            for parameter in parameters:
                np.testing.assert_allclose(values[parameter.name], parameter.value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
async def test_accumulated_gradients_are_divided_once(stage: ZeROStage) -> None:
    async with optimizers(2, stage, learning_rate=1.0) as made:
        for optimizer in made:
            for micro in range(4):
                for name, shape in SHAPES.items():
                    optimizer.accumulate_grad(name, np.full(shape, micro + rank_of(optimizer)))
            optimizer.apply_accumulated_grads(4)
            optimizer.apply_accumulated_grads(4)
        await on_all(made, ZeROOptimizer.optimizer_step)
        for values in await values_of(made):
            for parameter in draw_parameters():
                np.testing.assert_allclose(values[parameter.name], parameter.value - 2.0, rtol=1e-6)


async def test_steps_do_not_accumulate() -> None:
    """The same gradient in each step moves values by the same distance."""
    async with optimizers(2, ZeROStage.STAGE1, learning_rate=1.0) as made:
        for step in range(1, 4):
            for optimizer in made:
                for name, shape in SHAPES.items():
                    optimizer.accumulate_grad(name, np.ones(shape))
                optimizer.apply_accumulated_grads(1)
            await on_all(made, ZeROOptimizer.optimizer_step)
            values = (await values_of(made))[0]
            for parameter in draw_parameters():
                np.testing.assert_allclose(values[parameter.name], parameter.value - step, rtol=1e-5)


async def test_more_gradients_than_steps_are_refused() -> None:
    async with optimizers(1, ZeROStage.STAGE1) as (optimizer,):
        for _ in range(3):
            optimizer.accumulate_grad("head", np.ones((4, 11)))
        with pytest.raises(UsageError, match="accumulation_steps: expected at least the 3 gradients that head has had"):
            optimizer.apply_accumulated_grads(2)
        with pytest.raises(UsageError, match="accumulation_steps: expected 1 or more, got 0"):
            optimizer.apply_accumulated_grads(0)


async def test_new_gradients_take_the_place_of_earlier_ones() -> None:
    async with optimizers(1, ZeROStage.STAGE2, learning_rate=1.0) as (optimizer,):
        optimizer.accumulate_grad("scale", np.array(5.0))
        optimizer.update_gradients({"scale": np.array(2.0)})
        await optimizer.optimizer_step()
        values = (await values_of([optimizer]))[0]
        assert values["scale"] == draw_parameters()[3].value - np.float32(2.0)


@pytest.mark.parametrize("stage", STAGES)
async def test_gradients_that_are_not_finite_are_dropped_on_all_ranks(stage: ZeROStage) -> None:
    async with optimizers(2, stage, learning_rate=1.0, clip_norm=1.0) as made:
        made[1].accumulate_grad("scale", np.array(math.inf))
        for result in await outcomes(made, ZeROOptimizer.optimizer_step):
            assert isinstance(result, NonFiniteValue)
        for optimizer in made:
            optimizer.accumulate_grad("scale", np.array(0.5))
        await on_all(made, ZeROOptimizer.optimizer_step)
        for values in await values_of(made):
            assert values["scale"] == draw_parameters()[3].value - np.float32(0.5)


async def test_the_learning_rate_can_be_set() -> None:
    async with optimizers(1, ZeROStage.STAGE1, learning_rate=0.25) as (optimizer,):
        assert optimizer.get_lr() == 0.25
        optimizer.set_lr(0.5)
        assert optimizer.get_lr() == 0.5
        for bad in (-1.0, math.nan, math.inf):
            with pytest.raises(UsageError, match="learning_rate: expected a finite number >= 0"):
                optimizer.set_lr(bad)


async def test_only_stage_3_gathers_and_releases_parameters() -> None:
    for stage in STAGES:
        async with optimizers(2, stage) as made:
            if stage is ZeROStage.STAGE3:
                await on_all(made, ZeROOptimizer.gather_parameters)
                assert not any(each.is_released for each in made[0].engine.parameters)
                for optimizer in made:
                    optimizer.release_parameters()
                assert all(each.is_released for each in made[0].engine.parameters)
                continue
            with pytest.raises(UsageError, match="gather: expected stage 3"):
                await made[0].gather_parameters()
            with pytest.raises(UsageError, match="release: expected stage 3"):
                made[0].release_parameters()


async def test_memory_is_that_of_the_engine() -> None:
    async with optimizers(4, ZeROStage.STAGE3, SGD(momentum=0.9)) as made:
        stats = made[0].get_memory_stats()
        assert stats == made[0].engine.memory_stats()
        assert stats.whole == 12 * stats.values


async def test_what_does_not_fit_is_refused_by_name() -> None:
    async with optimizers(1, ZeROStage.STAGE1) as (optimizer,):
        with pytest.raises(UsageError, match="name: expected a registered parameter, got 'other'"):
            optimizer.accumulate_grad("other", np.ones(2))
        with pytest.raises(UsageError, match=r"gradient of head: expected shape \[4, 11\], got \[2\]"):
            optimizer.update_gradients({"head": np.ones(2)})
        with pytest.raises(UsageError, match="expected register_parameters"):
            await optimizer.register_parameters(draw_parameters())
    async with optimizers(1, ZeROStage.STAGE1, is_registered=False) as (optimizer,):
        with pytest.raises(UsageError, match="to be awaited first, on all ranks"):
            await optimizer.optimizer_step()
    async with local_world(1) as (node,):
        with pytest.raises(UsageError, match="clip_norm: expected a positive number, got 0"):
            ZeROOptimizer(SGD(), ZeROConfig(), node.world, clip_norm=0)


async def test_layers_are_sharded_with_their_parameters() -> None:
    async with optimizers(2, ZeROStage.STAGE3, is_registered=False) as made:
        for optimizer, sharded in zip(made, await on_all(made, register_layer), strict=True):
            assert isinstance(sharded, ShardedStage)
            assert all(parameter.is_released for parameter in optimizer.engine.parameters)


async def register_layer(optimizer: ZeROOptimizer) -> Any:
    layer = Linear("a", 4, 4, initializer=Initializer.from_seed(0))
    (sharded,) = await optimizer.register_parameters(layer.parameters(), layers=[layer])
    return sharded


async def test_a_model_parallel_context_says_who_the_replicas_are() -> None:
    async with local_world(2) as nodes, asyncio.timeout(PATIENCE):
        config = ModelParallelConfig(num_devices=2, device_ids=(0, 1))
        contexts = await on_all(nodes, lambda node: ModelParallelContext.create(config, node.world))
        made = [ZeROOptimizer(SGD(), ZeROConfig(), context, learning_rate=1.0) for context in contexts]
        await on_all(made, lambda optimizer: optimizer.register_parameters(draw_parameters()))
        made[0].accumulate_grad("scale", np.array(1.0))
        await on_all(made, ZeROOptimizer.optimizer_step)
        for values in await values_of(made):
            assert values["scale"] == draw_parameters()[3].value - np.float32(0.5)
