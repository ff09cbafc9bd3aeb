"""Losses of 8-bit gradients in one step are made up for in the next, by parameter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from tests.products import in_turn
from tests.soak import chosen
from tests.zero.replicas import PATIENCE, on_all, outcomes, whole_values

STAGES = list(ZeROStage)
SHAPES: dict[str, tuple[int, ...]] = {"table": (40, 9), "weight": (700,), "bias": (7,)}
STEPS, RATE, RANKS = chosen(15, soak=50), 0.1, 3


@asynccontextmanager
async def compressing(stage: ZeROStage, **settings: Any) -> AsyncIterator[list[ZeroEngine]]:
    """Yield engines of parameters that begin with zeros."""
    config = ZeROConfig(stage=stage, gradient_compression=True, **settings)
    async with local_world(RANKS) as nodes, asyncio.timeout(PATIENCE):
        made = [
            ZeroEngine(
                [Parameter(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()],
                SGD(),
                config,
                node.world,
            )
            for node in nodes
        ]
        await on_all(made, lambda engine: engine.prepare())
        yield made


def constant_gradient(parameter: Parameter, rank: int) -> Array:
    """Return the gradient that ``rank`` finds in every step."""
    rng = np.random.default_rng([rank, *parameter.name.encode()])
    return np.asarray(rng.normal(size=parameter.shape), parameter.dtype)


async def give_and_reduce(engine: ZeroEngine, *, micro_steps: int = 1) -> None:
    """Reduce after each micro-step where that can be, else once."""
    engine.zero_grad()
    for number in range(micro_steps):
        for parameter in engine.parameters:
            parameter.accumulate(constant_gradient(parameter, engine.communicator.rank) / np.float32(micro_steps))
        if engine.config.stage.shards_gradients or number == micro_steps - 1:
            await engine.reduce()


async def train(engine: ZeroEngine, steps: int, *, micro_steps: int = 1) -> None:
    for _ in range(steps):
        await give_and_reduce(engine, micro_steps=micro_steps)
        await engine.step(RATE)


async def drift(made: list[ZeroEngine], steps: int) -> float:
    """Return how far values are, after ``steps``, from where exact gradients take them; replicas must be equal."""
    found, *others = await on_all(made, whole_values)
    worst = 0.0
    for parameter in made[0].parameters:
        for other in others:
            np.testing.assert_array_equal(other[parameter.name], found[parameter.name])
        mean = np.mean([constant_gradient(parameter, rank) for rank in range(RANKS)], axis=0, dtype=np.float64)
        worst = max(worst, float(np.abs(found[parameter.name] + RATE * steps * mean).max()))
    return worst


@pytest.mark.parametrize(("stage", "micro_steps"), in_turn(STAGES, [1, 3]))
async def test_a_constant_gradient_drifts_no_further_in_many_steps_than_in_one(
    stage: ZeROStage, micro_steps: int
) -> None:
    async with compressing(stage) as made:
        await on_all(made, lambda engine: train(engine, STEPS, micro_steps=micro_steps))
        assert await drift(made, STEPS) < 0.003, "several times as much without feedback"


async def test_without_feedback_it_drifts() -> None:
    async with compressing(ZeROStage.STAGE1, error_feedback=False) as made:
        await on_all(made, lambda engine: train(engine, STEPS))
        assert await drift(made, STEPS) > 0.01
        assert made[0].residuals() == {}


@pytest.mark.parametrize("stage", [ZeROStage.STAGE1, ZeROStage.STAGE3])
async def test_residuals_survive_another_division_into_buckets(stage: ZeROStage) -> None:
    """Half of the steps in large buckets, the others in small ones, by another engine."""
    async with compressing(stage) as made:
        await on_all(made, lambda engine: train(engine, STEPS))
        saved = [engine.residuals() for engine in made]
        pieces = [{(one.parameter, one.kind): one.array.copy() for one in engine.state_pieces()} for engine in made]
    assert {name: residual.shape for name, residual in saved[0].items()} == {
        name: (int(np.prod(shape)),) for name, shape in SHAPES.items()
    }
    assert all(np.abs(residual).max() > 0.0 for residual in saved[1].values())
    async with compressing(stage, bucket_size_mb=0.001, reduce_bucket_size=90) as made:
        assert len(made[0].partition.buckets) > len(SHAPES)
        for engine, residuals in zip(made, saved, strict=True):
            engine.restore_residuals(residuals)
        await on_all(made, lambda engine: engine.restore(pieces[engine.communicator.rank], step_count=STEPS))
        for engine, residuals in zip(made, saved, strict=True):
            for name, residual in engine.residuals().items():
                np.testing.assert_array_equal(residual, residuals[name])
        await on_all(made, lambda engine: train(engine, STEPS))
        assert await drift(made, 2 * STEPS) < 0.003


@pytest.mark.parametrize("stage", STAGES)
async def test_only_rows_that_are_sent_have_residuals(stage: ZeROStage) -> None:
    """What a rank owns of its gradients it adds as it is."""
    async with compressing(stage) as made:
        await on_all(made, lambda engine: train(engine, 2))
        for engine in made:
            sent = (RANKS - 1) * sum(bucket.width for bucket in engine.partition.buckets)
            assert engine.memory_stats().residuals == 8 * sent
            residuals, rank = engine.residuals(), engine.communicator.rank
            for index, parameter in enumerate(engine.parameters):
                start, stop = engine.partition.bounds(index, rank)
                assert not residuals[parameter.name][start:stop].any()
            assert any(residual.any() for residual in residuals.values())


@pytest.mark.parametrize("stage", STAGES)
async def test_a_step_that_is_not_taken_leaves_residuals_as_they_were(stage: ZeROStage) -> None:
    async with compressing(stage) as made:
        await on_all(made, lambda engine: train(engine, 2))
        before = [engine.residuals() for engine in made]
        await on_all(made, give_and_reduce)
        for engine in made:
            engine.zero_grad()
        made[1].parameters[1].grad[3] = np.nan
        await on_all(made, ZeroEngine.reduce)
        for error in await outcomes(made, lambda engine: engine.step(RATE)):
            assert isinstance(error, NonFiniteValue)
        for engine, residuals in zip(made, before, strict=True):
            engine.zero_grad()
            for name, residual in engine.residuals().items():
                np.testing.assert_array_equal(residual, residuals[name])
        await on_all(made, lambda engine: train(engine, STEPS - 2))
        assert await drift(made, STEPS) < 0.003


async def test_a_step_that_fails_on_a_rank_leaves_residuals_as_they_were() -> None:
    async with compressing(ZeROStage.STAGE2) as made:
        await on_all(made, lambda engine: train(engine, 2))
        before = [engine.residuals() for engine in made]
        await on_all(made, give_and_reduce)
        await made[0].abandon()
        for error in (await outcomes(made, lambda engine: engine.step(RATE)))[1:]:
            assert isinstance(error, Exception)
        await on_all(made, lambda engine: engine.resume())
        for engine, residuals in zip(made, before, strict=True):
            for name, residual in engine.residuals().items():
                np.testing.assert_array_equal(residual, residuals[name])
        await on_all(made, lambda engine: train(engine, STEPS - 2))
        assert await drift(made, STEPS) < 0.003


async def test_an_unprepared_engine_takes_no_residuals() -> None:
    async with local_world(1) as (node,):
        engine = ZeroEngine([Parameter("p", np.zeros(3, np.float32))], SGD(), ZeROConfig(), node.world)
        with pytest.raises(ValueError, match="restore_residuals: await prepare"):
            engine.restore_residuals({})
