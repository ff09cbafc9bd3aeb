"""Gradients on their way: micro-batches, compression, norms, and what others may add to them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue
from asyncpar.nn import Array
from asyncpar.nn.optimizers import SGD, Adam, Optimizer
from asyncpar.zero import ZeroEngine, ZeROStage
from tests.zero.replicas import (
    SHAPES,
    draw_gradient,
    draw_parameters,
    engines,
    give_gradients,
    on_all,
    outcomes,
    take_steps,
    whole_values,
)

SHARDING = [ZeROStage.STAGE2, ZeROStage.STAGE3]


def mean_gradient(name: str, size: int, *steps: int) -> Array:
    """Return the mean over ranks of the sum over steps, in float64."""
    drawn = [draw_gradient(name, SHAPES[name], rank=rank, step=step) for rank in range(size) for step in steps]
    return np.asarray(np.sum(drawn, axis=0) / size)


def own_part(engine: ZeroEngine, name: str, whole: Array) -> Array:
    start, stop = engine.partition.bounds(list(SHAPES).index(name), engine.communicator.rank)
    return whole.reshape(-1)[start:stop]


@pytest.mark.parametrize("stage", SHARDING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_micro_batches_add_up_in_what_owners_keep(stage: ZeROStage, dtype: str) -> None:
    tolerance = 1e-6 if dtype == "float32" else 0.05
    async with engines(3, stage, dtype=dtype) as made:
        for step in range(4):
            for engine in made:
                give_gradients(engine.parameters, rank=engine.communicator.rank, step=step)
                for parameter in reversed(engine.parameters):
                    engine.ready(parameter.name)
            await on_all(made, ZeroEngine.reduce)
        for engine in made:
            for name, gradient in engine.reduced().items():
                expected = own_part(engine, name, mean_gradient(name, 3, 0, 1, 2, 3))
                np.testing.assert_allclose(gradient.astype(np.float64), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_equal_micro_batches_weigh_as_much_as_there_are(stage: ZeROStage) -> None:
    """k equal gradients make k times the gradient, not k (k + 1) / 2 times."""
    async with engines(2, stage, rule=SGD()) as made:
        for engine in made:
            for _ in range(5):
                for parameter in engine.parameters:
                    parameter.accumulate(2.0)
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            assert all((gradient == 10.0).all() for gradient in engine.reduced().values())


@pytest.mark.parametrize("stage", SHARDING)
async def test_a_gradient_that_comes_while_the_last_is_reduced_is_not_mixed_up_with_it(stage: ZeROStage) -> None:
    async with engines(2, stage) as made:
        for engine in made:
            for parameter in engine.parameters:
                parameter.accumulate(1.0)
                engine.ready(parameter.name)
                parameter.accumulate(100.0)
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            assert all((gradient == 1.0).all() for gradient in engine.reduced().values())
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            assert all((gradient == 101.0).all() for gradient in engine.reduced().values())


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_parameters_without_gradient_count_as_zeros(stage: ZeROStage) -> None:
    async with engines(3, stage) as made:
        for engine in made:
            if engine.communicator.rank == 1:
                engine.parameters[0].accumulate(3.0)
                engine.ready("embedding")
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            reduced = engine.reduced()
            assert (reduced["embedding"] == 1.0).all()
            assert not reduced["head"].any()


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_gradients_are_forgotten_between_steps(stage: ZeROStage) -> None:
    async with engines(2, stage) as made:
        await take_steps(made, 0)
        for engine in made:
            engine.zero_grad()
            engine.parameters[0].accumulate(1.0)
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            assert (engine.reduced()["embedding"] == 1.0).all()
            assert not engine.reduced()["head"].any()


async def test_any_order_of_gradients_will_do() -> None:
    """Ranks report in opposite orders, and have room for one bucket at a time."""
    async with engines(2, ZeROStage.STAGE2, bucket_size_mb=1e-5, max_memory_usage_mb=0.0004) as made:
        assert made[0]._budget.window < len(made[0].partition.buckets)  # noqa: SLF001  # makes sure that the configuration leaves room for fewer buckets than there are: the window is no statistic
        for engine in made:
            rank = engine.communicator.rank
            give_gradients(engine.parameters, rank=rank, step=0)
            for parameter in engine.parameters if rank else reversed(engine.parameters):
                engine.ready(parameter.name)
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            for name, gradient in engine.reduced().items():
                np.testing.assert_allclose(gradient, own_part(engine, name, mean_gradient(name, 2, 0)), rtol=1e-5)


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_what_is_added_to_reduced_gradients_is_applied(stage: ZeROStage) -> None:
    async with engines(2, stage, rule=SGD()) as made:
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            for gradient in engine.reduced().values():
                gradient += 0.5
        await on_all(made, lambda engine: engine.step(2.0))
        for engine, values in zip(made, await on_all(made, whole_values), strict=True):
            for parameter in draw_parameters():
                np.testing.assert_array_equal(values[parameter.name], parameter.value - 1.0)
            assert engine.step_count == 1


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_the_norm_is_that_of_the_mean_gradient(stage: ZeROStage) -> None:
    whole = np.concatenate([mean_gradient(name, 3, 0).reshape(-1) for name in SHAPES])
    without_head = np.concatenate([mean_gradient(name, 3, 0).reshape(-1) for name in SHAPES if name != "head"])
    async with engines(3, stage) as made:
        for engine in made:
            give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
        await on_all(made, ZeroEngine.reduce)
        norms = await on_all(made, ZeroEngine.global_norm)
        assert norms == [pytest.approx(float(np.linalg.norm(whole)), rel=1e-6)] * 3
        assert len(set(norms)) == 1
        others = await on_all(made, lambda engine: engine.global_norm(without={"head"}))
        assert others[0] == pytest.approx(float(np.linalg.norm(without_head)), rel=1e-6)
        for engine in made:
            engine.scale(0.5)
        halved = await on_all(made, ZeroEngine.global_norm)
        assert halved[0] == pytest.approx(norms[0] / 2, rel=1e-15)


async def test_the_norm_has_the_same_bits_in_all_stages_and_in_data_parallelism() -> None:
    found = set()
    for stage in ZeROStage:
        async with engines(3, stage, algorithm="halving") as made:
            for engine in made:
                give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
            await on_all(made, ZeroEngine.reduce)
            found.update(await on_all(made, ZeroEngine.global_norm))
            if stage is ZeROStage.NONE:
                optimizer = Optimizer(made[1].parameters, SGD())
                found.add(math.sqrt(optimizer.squared_norm(parts=3)))
    assert len(found) == 1


async def test_scaling_loses_nothing_in_half_precision() -> None:
    """A gradient that float16 can hold only because it is scaled up reaches the master value."""
    scale = 2.0**16
    async with engines(2, ZeROStage.STAGE2, rule=SGD(), shapes={"a": (4,)}, dtype="float16") as made:
        for engine in made:
            engine.parameters[0].accumulate(np.full(4, 2.0**-30 * scale, np.float32))
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            engine.scale(1.0 / scale)
        before = [piece.array.copy() for piece in made[0].state_pieces()]
        await on_all(made, lambda engine: engine.step(2.0**20))
        np.testing.assert_array_equal(made[0].state_pieces()[0].array, before[0] - np.float32(2.0**-10))


COMPRESSED: dict[str, Any] = {"gradient_compression": True}


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_compressed_gradients_are_nearly_those_that_they_were(stage: ZeROStage) -> None:
    async with engines(3, stage, **COMPRESSED) as made:
        for engine in made:
            give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
        await on_all(made, ZeroEngine.reduce)
        worst = 0.0
        for engine in made:
            for name, gradient in engine.reduced().items():
                expected = mean_gradient(name, 3, 0)
                expected = own_part(engine, name, expected) if stage.shards_states else expected.reshape(-1)
                np.testing.assert_allclose(gradient, expected, atol=0.03)
                worst = max(worst, float(np.abs(gradient - expected).max(initial=0.0)))
        assert worst > 1e-4, "it was compressed"


async def test_compressed_gradients_take_a_quarter_of_the_bytes() -> None:
    async with engines(2, ZeROStage.STAGE2, shapes={"a": (64, 128)}, **COMPRESSED) as made:
        for engine in made:
            give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
        await on_all(made, ZeroEngine.reduce)
        sent = made[0].communicator.traffic.of("all_to_all").payload_bytes
        assert sent == 4 + 64 * 64 + 4 * 4, "a status, a byte for each value, and a scale for every 1,024"


async def test_compressed_replicas_stay_equal() -> None:
    async with engines(3, ZeROStage.STAGE1, rule=Adam(), **COMPRESSED) as made:
        await take_steps(made, *range(4))
        values = await on_all(made, whole_values)
        for name in SHAPES:
            assert len({each[name].tobytes() for each in values}) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_gradients_that_cannot_be_compressed_stop_the_step_everywhere(bad: float) -> None:
    async with engines(3, ZeROStage.STAGE2, **COMPRESSED) as made:
        made[2].parameters[0].grad[0, 0] = bad
        await on_all(made, ZeroEngine.reduce)
        for result in await outcomes(made, lambda engine: engine.step(0.1)):
            assert isinstance(result, NonFiniteValue)
