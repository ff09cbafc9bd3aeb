"""Traffic of replicas, in bytes, against the formulas: P is the bytes of all parameters, N the number of replicas."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.zero import ZeroEngine, ZeROStage
from tests.zero.replicas import EVEN_SHAPES, SHAPES, engines, give_gradients, on_all

P = 4 * sum(48 if len(shape) == 2 else 24 for shape in EVEN_SHAPES.values())


def sent(communicator: Communicator, operation: str) -> int:
    return communicator.traffic.of(operation).payload_bytes


async def step_and_count(engine: ZeroEngine, *, gathers: int = 0) -> tuple[int, int]:
    """Take a step, after some gathers, and return the bytes of its reduce-scatters and all-gathers."""
    communicator = engine.communicator
    scattered, gathered = sent(communicator, "reduce_scatter"), sent(communicator, "all_gather")
    for _ in range(gathers):
        await engine.gather()
        engine.release()
    give_gradients(engine.parameters, rank=communicator.rank, step=0)
    await engine.reduce()
    await engine.step(0.1)
    agreed = (engine.communicator.size - 1) * (4 * 8 + 8 * gathers)
    return (
        sent(communicator, "reduce_scatter") - scattered,
        sent(communicator, "all_gather") - gathered - agreed,
    )


@pytest.mark.parametrize("algorithm", ["ring", "pairwise"])
@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2])
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_a_step_reduces_and_gathers_everything_once(size: int, stage: ZeROStage, algorithm: str) -> None:
    """P (N - 1) / N bytes each, together what an all-reduce sends."""
    async with engines(size, stage, shapes=EVEN_SHAPES, algorithm=algorithm) as made:
        for scattered, gathered in await on_all(made, step_and_count):
            assert scattered == P * (size - 1) // size
            assert gathered == P * (size - 1) // size


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_stage_3_sends_one_and_a_half_times_what_an_all_reduce_sends(size: int) -> None:
    """Everything is gathered for the forward and for the backward pass, and gradients are reduced."""
    async with engines(size, ZeROStage.STAGE3, shapes=EVEN_SHAPES, algorithm="ring") as made:
        for scattered, gathered in await on_all(made, lambda engine: step_and_count(engine, gathers=2)):
            assert scattered + gathered == 3 * P * (size - 1) // size
            assert 2 * (scattered + gathered) == 3 * (2 * P * (size - 1) // size)


async def test_half_precision_sends_half() -> None:
    async with engines(2, ZeROStage.STAGE2, shapes=EVEN_SHAPES, dtype="bfloat16", algorithm="ring") as made:
        for scattered, gathered in await on_all(made, step_and_count):
            assert scattered == gathered == P // 2 // 2


async def test_padding_is_less_than_a_value_per_rank_and_parameter() -> None:
    async with engines(3, ZeROStage.STAGE1, shapes=SHAPES, algorithm="ring") as made:
        values = sum(parameter.size for parameter in made[0].parameters)
        for scattered, gathered in await on_all(made, step_and_count):
            assert scattered == gathered
            assert 4 * values * 2 / 3 <= scattered < 4 * (values + 3 * len(SHAPES)) * 2 / 3


async def test_nothing_is_sent_where_there_is_nobody_else() -> None:
    async with engines(1, ZeROStage.STAGE2) as made:
        await step_and_count(made[0])
        assert made[0].communicator.traffic.payload_bytes == 0
        await asyncio.sleep(0)
