"""Training over ranks is training in one process."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import numpy as np
import pytest

from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW, EarlyStep
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from asyncpar.train import Batches, DataParallelTrainer, LanguageModel, TrainingConfig

CONFIG = TrainingConfig(
    model=TransformerConfig(vocabulary=32, length=8, features=16, layers=2, heads=2, dtype="float64"),
    rule=AdamW(beta2=0.95),
    schedule=WarmupCosine(peak=5e-3, steps=12, warmup=3),
    steps=12,
    rows=7,
)
CORPUS = (np.arange(500) ** 2 % 31).astype(np.uint8)


def make_batches() -> Batches:
    return Batches(CORPUS, rows=CONFIG.rows, length=CONFIG.model.length, seed=1)


def make_trainer(node: Node, model: LanguageModel, *, lossy: bool = False) -> DataParallelTrainer:
    config = ThreeDParallelismConfig(dp_size=node.size)
    synchronizer = GradientSynchronizer(
        config,
        RankMapping(config, node.rank),
        communicator=node.world,
        compression=GradientCompressionConfig(codec="int8" if lossy else None),
    )
    return DataParallelTrainer(model, make_batches(), communicator=node.world, synchronizer=synchronizer)


def train_alone() -> list[float]:
    model, batches, losses = LanguageModel(CONFIG), make_batches(), []
    for step in range(CONFIG.steps):
        losses.append(model.accumulate(batches.windows(step), scale=1 / CONFIG.tokens) / CONFIG.tokens)
        model.update(step)
    return losses


async def train_together(size: int, *, lossy: bool = False) -> list[list[float]]:
    async def main(node: Node) -> list[float]:
        trainer = make_trainer(node, LanguageModel(CONFIG), lossy=lossy)
        losses = [report.loss async for report in trainer.run()]
        await trainer.check_replicas()
        return losses

    async with local_world(size) as nodes:
        return list(await asyncio.gather(*(main(node) for node in nodes)))


async def test_without_a_limit_of_the_norm_the_optimizer_moves_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", replace(CONFIG, clip_norm=None))
    updates: list[object] = []
    begin = LanguageModel.begin_update

    def watched(model: LanguageModel, step: int) -> EarlyStep | None:
        updates.append(begin(model, step))
        return begin(model, step)

    monkeypatch.setattr(LanguageModel, "begin_update", watched)
    alone = train_alone()
    for losses in await train_together(3):
        np.testing.assert_allclose(losses, alone, rtol=1e-11)
    assert all(isinstance(update, EarlyStep) for update in updates)
    assert len(updates) == 3 * CONFIG.steps


@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_losses_are_those_of_one_process_for_uneven_shares_too(size: int) -> None:
    alone = train_alone()
    assert alone[-1] < 0.9 * alone[0]
    for losses in await train_together(size):
        np.testing.assert_allclose(losses, alone, rtol=1e-11)


async def test_lossy_training_ends_near_one_process() -> None:
    losses = await train_together(3, lossy=True)
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] == pytest.approx(train_alone()[-1], rel=0.02)
    assert losses[0] != train_alone()


async def test_replicas_that_differ_are_found() -> None:
    async def main(node: Node) -> None:
        model = LanguageModel(CONFIG)
        model.model.parameters()[0].value[0, 0] += float(node.rank == 1) * 1e-9
        await make_trainer(node, model).check_replicas()

    async with local_world(3) as nodes:
        errors = await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True)
    assert all(isinstance(error, AsyncparError) for error in errors)
    assert "parameters of ranks [1] differ from those of rank 0" in str(errors[0])


async def test_batches_of_another_size_are_refused() -> None:
    async with local_world(1) as (node,):
        model = LanguageModel(replace(CONFIG, rows=9))
        with pytest.raises(UsageError, match="batches: expected the batch and the window length"):
            make_trainer(node, model)


def test_a_run_of_no_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 1 or more, got 0"):
        replace(CONFIG, steps=0)
