"""Pipelines, tensor parallelism and replicas with frozen parameters train as one process does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import AsyncparError
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator
from asyncpar.nn import Parameter, Transformer, softmax_cross_entropy
from asyncpar.nn.optimizers import AdamW, Optimizer, clip_factor
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.ranks import ROWS, Ranks, running
from tests.hybrid.worlds import RATE, TINY, Array, draw_batch, make_config
from tests.products import in_turn
from tests.soak import chosen, first

MODEL = replace(TINY, layers=4, tied_embeddings=True)
STEPS = 4
FROZEN = (("embedding", "block0"), ("block3", "norm/"), ("block", "norm/"), ())
"""What begins so is frozen, step by step; in the third one all of the stages in the middle."""


def freeze(parameters: Iterable[Parameter], step: int) -> None:
    """Freeze what is frozen in a step, and nothing else."""
    for parameter in parameters:
        parameter.requires_grad = not parameter.name.startswith(FROZEN[step])


def make(
    dp: int,
    tp: int,
    pp: int,
    stage: ZeROStage = ZeROStage.NONE,
    schedule: PipelineScheduleType = PipelineScheduleType.GPIPE,
    **more: Any,
) -> HybridConfig:
    return make_config(
        dp,
        tp,
        pp,
        micro_batches=2,
        zero=ZeROConfig(stage=stage),
        clip_norm=0.3,
        pipeline_schedule=schedule,
        rule=AdamW(weight_decay=0.1),
        layers=MODEL.layers,
        **more,
    )


LAYOUTS = {
    "replicas": make(2, 1, 1),
    "stages": make(1, 1, 4),
    "zero 2": make(2, 2, 1, ZeROStage.STAGE2),
    "zero 3": make(2, 1, 2, ZeROStage.STAGE3, PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD),
    "zbv": make(1, 1, 2, schedule=PipelineScheduleType.ZBV),
    "interleaved": make(1, 1, 2, schedule=PipelineScheduleType.INTERLEAVED_ONE_F1B, num_model_chunks=2),
    "slices": make(1, 2, 1),
    "zero 1": make(2, 1, 2, ZeROStage.STAGE1),
    "all": make(2, 2, 2, ZeROStage.STAGE2),
}


@lru_cache(maxsize=16)
def train_alone(config: HybridConfig) -> tuple[list[float], dict[tuple[str, str], Array]]:
    """Return norms, and values and states, after steps on whole batches in one process."""
    transformer, norms = Transformer(MODEL), []
    optimizer = Optimizer(transformer.parameters(), config.rule)
    tokens, targets = draw_batch(MODEL, 0, rows=ROWS)
    for step in range(STEPS):
        freeze(optimizer.parameters, step)
        optimizer.zero_grad()
        logits, saved = transformer.forward(tokens)
        _, gradient = softmax_cross_entropy(logits, targets, scale=1.0 / targets.size)
        transformer.backward(saved, gradient)
        norms.append(float(np.sqrt(optimizer.squared_norm())))
        assert config.clip_norm is not None
        optimizer.scale(clip_factor(norms[-1], config.clip_norm))
        optimizer.step(RATE)
    tensors = {(parameter.name, "value"): parameter.value for parameter in optimizer.parameters}
    for parameter in optimizer.parameters:
        tensors |= {(parameter.name, kind): array for kind, array in optimizer.state(parameter.name).items()}
    return norms, tensors


async def take_steps(ranks: Ranks, steps: Iterable[int]) -> list[float]:
    """Take ``steps`` on all ranks; return the norms."""

    async def main(coordinator: ThreeDParallelismCoordinator) -> list[float]:
        norms = []
        for step in steps:
            freeze(coordinator.parameters(), step)
            norms.append((await ranks.step(coordinator)).gradient_norm)
        return norms

    return (await ranks.together(main))[0]  # type: ignore[no-any-return]


def assert_equal(ranks: Ranks, norms: list[float], alone: tuple[list[float], dict[tuple[str, str], Array]]) -> None:
    np.testing.assert_allclose(norms, alone[0], rtol=1e-9)
    got = ranks.values()
    for key, expected in alone[1].items():
        np.testing.assert_allclose(got[key], expected, rtol=1e-8, atol=1e-9, err_msg=str(key))


@pytest.mark.parametrize("layout", first(6, LAYOUTS))
async def test_frozen_parts_of_a_model_stay_and_go_on_as_in_one_process(layout: str) -> None:
    config = LAYOUTS[layout]
    async with running(MODEL, config) as ranks:
        assert_equal(ranks, await take_steps(ranks, range(STEPS)), train_alone(config))


@pytest.mark.parametrize(
    ("saver", "loader"), first(2, [("replicas", "zero 1"), ("stages", "zero 3"), ("zero 2", "stages")])
)
async def test_checkpoints_keep_how_long_parameters_were_frozen(saver: str, loader: str, tmp_path: Path) -> None:
    async with running(MODEL, LAYOUTS[saver]) as ranks:
        norms = await take_steps(ranks, (0, 1, 2))
        await ranks.together(lambda one: one.save(tmp_path))
    async with running(MODEL, LAYOUTS[loader]) as ranks:
        await ranks.together(lambda one: one.load(tmp_path))
        assert_equal(ranks, norms + await take_steps(ranks, (3,)), train_alone(LAYOUTS[loader]))


async def test_another_configuration_goes_on_with_what_is_frozen() -> None:
    config = LAYOUTS["zero 1"]
    async with running(MODEL, config) as ranks:
        norms = await take_steps(ranks, (0, 1, 2))
        await ranks.together(lambda one: one.update_config(config))
        for one in ranks.all:
            assert all(p.requires_grad is not p.name.startswith(FROZEN[2]) for p in one.parameters())
        assert_equal(ranks, norms + await take_steps(ranks, (3,)), train_alone(config))


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn(
        ["block1/mlp/widen/weight", "block1/mlp/narrow/bias", "embedding/tokens"],
        chosen(["replicas", "slices", "zero 3"], soak=list(LAYOUTS)),
    ),
)
async def test_ranks_that_differ_all_get_an_error_that_says_so(layout: str, name: str) -> None:
    async with running(MODEL, LAYOUTS[layout]) as ranks:
        holders = [one for one in ranks.all if any(name in p.name for p in one.parameters())]
        if len(holders) < 2:
            pytest.skip("one rank alone has it")
        await take_steps(ranks, (3,))
        for parameter in holders[-1].parameters():
            if name in parameter.name:
                parameter.requires_grad = False
        async with asyncio.timeout(60.0):
            outcomes = await asyncio.gather(*map(ranks.step, ranks.all), return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, AsyncparError), repr(outcome)
            assert "frozen" in str(outcome)
        for parameter in holders[-1].parameters():
            parameter.requires_grad = True
        await ranks.take_step()
