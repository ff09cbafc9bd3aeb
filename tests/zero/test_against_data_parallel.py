"""Sharded training against data parallelism, in which all ranks all-reduce and update everything: the same bits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import Name
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD, Adam, AdamW, Optimizer, Rule, clip_factor
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from tests.products import sampled
from tests.zero.replicas import (
    PATIENCE,
    SHAPES,
    draw_parameters,
    give_gradients,
    on_all,
    take_steps,
    whole_values,
)

RULES = {
    "sgd": SGD(momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam": Adam(weight_decay=0.05),
    "adamw": AdamW(weight_decay=0.05),
}
STEPS = 3
CLIP = 2.0
RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What replicas are trained with; ``algorithm`` adds all values in one order."""

    rule: Rule
    dtype: str = "float32"
    algorithm: Name | None = None
    clips: bool = False
    bucket_size_mb: float = 25
    reduce_bucket_size: int = 1000


async def train_whole(communicator: Communicator, setting: Setting) -> dict[str, Array]:
    """Train by data parallelism on one rank, and return values and states."""
    parameters = draw_parameters(dtype=setting.dtype)
    optimizer = Optimizer(parameters, setting.rule)
    for step in range(STEPS):
        optimizer.zero_grad()
        give_gradients(parameters, rank=communicator.rank, step=step)
        for parameter in parameters:
            await communicator.all_reduce(parameter.grad, op="mean", algorithm=setting.algorithm)
        if setting.clips:
            norm = float(np.sqrt(optimizer.squared_norm(parts=communicator.size)))
            assert norm > CLIP, "it is to be clipped"
            optimizer.scale(clip_factor(norm, CLIP))
        optimizer.step(RATE)
    found = {f"{name} {kind}": array for name in SHAPES for kind, array in optimizer.state(name).items()}
    return found | {parameter.name: np.array(parameter.value) for parameter in parameters}


async def train_sharded(communicator: Communicator, setting: Setting, stage: ZeROStage) -> dict[str, Array]:
    """The same with an engine; of values and states of whole parameters, return what this rank can see."""
    config = ZeROConfig(
        stage=stage,
        algorithm=setting.algorithm,
        bucket_size_mb=setting.bucket_size_mb,
        reduce_bucket_size=setting.reduce_bucket_size,
    )
    engine = ZeroEngine(draw_parameters(dtype=setting.dtype), setting.rule, config, communicator)
    await engine.prepare()
    for step in range(STEPS):
        engine.zero_grad()
        give_gradients(engine.parameters, rank=communicator.rank, step=step)
        for parameter in reversed(engine.parameters[1:]):
            engine.ready(parameter.name)
        await engine.reduce()
        if setting.clips:
            engine.scale(clip_factor(await engine.global_norm(), CLIP))
        await engine.step(RATE)
    found = {f"{piece.parameter} {piece.kind}": (piece.flat, piece.array) for piece in engine.state_pieces()}
    states = {name: array for name, (_, array) in found.items() if not name.endswith(" value")}
    return states | await whole_values(engine)


def assert_same_bits(got: dict[str, Array], whole: dict[str, Array], *, rank: int, size: int, stage: ZeROStage) -> None:
    """States that are sharded must be the owned part of whole ones."""
    for name, array in got.items():
        expected = whole[name].reshape(-1)
        if " " in name and stage.shards_states:
            step = -(-expected.size // size)
            expected = expected[rank * step : (rank + 1) * step]
        assert array.dtype == expected.dtype
        assert array.tobytes() == expected.tobytes(), f"{stage}, rank {rank}: {name}"


async def compare(size: int, setting: Setting, *, transport: str = "inproc") -> None:
    """Train in all stages, and compare each with data parallelism."""
    async with local_world(size, transport=transport) as nodes, asyncio.timeout(PATIENCE):
        worlds = [node.world for node in nodes]
        whole = await on_all(worlds, lambda world: train_whole(world, setting))
        for stage in ZeROStage:

            async def train(world: Communicator, stage: ZeROStage = stage) -> dict[str, Array]:
                return await train_sharded(world, setting, stage)

            for rank, got in enumerate(await on_all(worlds, train)):
                assert_same_bits(got, whole[rank], rank=rank, size=size, stage=stage)


@pytest.mark.parametrize(("size", "rule", "clips"), sampled([1, 2, 3, 4], list(RULES), [False, True]))
async def test_all_stages_come_to_the_bits_of_data_parallelism(size: int, rule: str, clips: bool) -> None:
    algorithm = Name("halving") if size > 1 else None
    await compare(size, Setting(rule=RULES[rule], algorithm=algorithm, clips=clips, reduce_bucket_size=60))


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_the_arena_adds_in_the_order_of_ranks_whatever_buckets_there_are(size: int) -> None:
    await compare(size, Setting(rule=RULES["adamw"], clips=True, bucket_size_mb=1e-4), transport="shm")


async def test_lanes_of_tcp_do_as_well() -> None:
    await compare(3, Setting(rule=RULES["adam"], algorithm=Name("halving"), clips=True), transport="tcp")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
async def test_all_precisions_do_as_well(dtype: str) -> None:
    await compare(3, Setting(rule=RULES["adamw"], dtype=dtype, algorithm=Name("halving"), clips=True))


@pytest.mark.parametrize("algorithm", [None, "ring", "pairwise"])
async def test_stages_agree_with_each_other_by_any_algorithm(algorithm: Name | None) -> None:
    setting = Setting(rule=RULES["adamw"], algorithm=algorithm)
    async with local_world(3) as nodes, asyncio.timeout(PATIENCE):
        worlds = [node.world for node in nodes]
        values: list[dict[str, Array]] = []
        for stage in ZeROStage:

            async def train(world: Communicator, stage: ZeROStage = stage) -> dict[str, Array]:
                return await train_sharded(world, setting, stage)

            trained = await on_all(worlds, train)
            values += [{name: array for name, array in got.items() if name in SHAPES} for got in trained]
        for name, array in values[0].items():
            assert len({other[name].tobytes() for other in values}) == 1, name
            assert array.size == 0 or not np.array_equal(array, dict_of(draw_parameters())[name])


def dict_of(parameters: list[Parameter]) -> dict[str, Array]:
    return {parameter.name: np.array(parameter.value) for parameter in parameters}


async def test_replicas_stay_equal_over_many_steps() -> None:
    async with local_world(4) as nodes, asyncio.timeout(PATIENCE):
        engines = [
            ZeroEngine(draw_parameters(), Adam(), ZeROConfig(stage=ZeROStage.STAGE2, bucket_size_mb=1e-4), node.world)
            for node in nodes
        ]
        await on_all(engines, ZeroEngine.prepare)
        await take_steps(engines, *range(20))
        values = await on_all(engines, whole_values)
        for name in SHAPES:
            assert len({each[name].tobytes() for each in values}) == 1


async def test_sums_are_not_averaged_where_that_is_asked_for() -> None:
    async with local_world(2) as nodes, asyncio.timeout(PATIENCE):
        for averages, divisor in ((True, 2.0), (False, 1.0)):
            config = ZeROConfig(stage=ZeROStage.STAGE2, average=averages)
            engines = [ZeroEngine(draw_parameters(), SGD(), config, node.world) for node in nodes]
            await on_all(engines, ZeroEngine.prepare)
            for engine in engines:
                for parameter in engine.parameters:
                    parameter.accumulate(1.0 + 2.0 * engine.communicator.rank)
            await on_all(engines, ZeroEngine.reduce)
            for engine in engines:
                for gradient in engine.reduced().values():
                    assert (gradient == 4.0 / divisor).all()
                engine.close()
