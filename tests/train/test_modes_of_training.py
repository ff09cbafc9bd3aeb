"""Every mode trains a model that ends equal on all ranks, and about as good as one process makes it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from asyncpar.core.config.names import Name
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, TuningConfig
from asyncpar.nn import TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from asyncpar.train import (
    Batches,
    LanguageModel,
    ReplicatedSession,
    StepReport,
    TrainingConfig,
    make_trainer,
    parse_mode,
)

CONFIG = TrainingConfig(
    model=TransformerConfig(vocabulary=32, length=8, features=16, layers=1, heads=2, dtype="float32"),
    rule=AdamW(beta2=0.95),
    schedule=WarmupCosine(peak=5e-3, steps=22, warmup=3),
    steps=22,
    rows=8,
)
CORPUS = (np.arange(500) ** 2 % 31).astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a rank has come to."""

    reports: list[StepReport]
    digest: str
    rounds: int
    sent: int


def make_batches() -> Batches:
    return Batches(CORPUS, rows=CONFIG.rows, length=CONFIG.model.length, seed=1)


async def train(node: Node, mode: str, codec: str = "none") -> Trained:
    model = LanguageModel(CONFIG)
    setup = make_trainer(
        parse_mode(mode),
        model,
        make_batches(),
        node=node,
        compression=GradientCompressionConfig(codec=None if codec == "none" else Name(codec)),
        bucketing=GradientBucketingConfig(),
    )
    before = node.bytes_sent
    reports = [report async for report in setup.trainer.run()]
    sent = node.bytes_sent - before
    await setup.trainer.check_replicas()
    rounds = setup.statistics().total_sync_operations
    return Trained(reports=reports, digest=model.digest(), rounds=rounds, sent=sent)


async def train_tuned(node: Node, tuning: TuningConfig, mode: str = "sync") -> tuple[str, str, list[float]]:
    """Return the digest of the model, the table of what was tuned, and the losses."""
    model = LanguageModel(replace(CONFIG, tuning=tuning))
    setup = make_trainer(
        parse_mode(mode),
        model,
        make_batches(),
        node=node,
        compression=GradientCompressionConfig(),
        bucketing=GradientBucketingConfig(),
    )
    session = ReplicatedSession(setup, model, node.world, has_codec=False)
    losses = [report.loss async for report in session.run()]
    await session.check_replicas()
    return model.digest(), await session.report(width=80), losses


@pytest.mark.parametrize("pin", ["", "1m@ring/256k"])
async def test_tuned_training_ends_as_one_process_does_and_reports_its_choices(pin: str) -> None:
    async with local_world(3) as nodes:
        ends = await asyncio.gather(*(train_tuned(node, TuningConfig(pin=pin)) for node in nodes))
    expected = last_loss_alone()
    assert len({digest for digest, _, _ in ends}) == 1
    for _, table, losses in ends:
        assert losses[-1] == pytest.approx(expected, rel=1e-4)
        assert (pin or "steps that counted") in table


@pytest.mark.parametrize("mode", ["local:4", "hierarchical:4", "async"])
async def test_tuning_is_refused_where_gradients_do_not_meet_in_every_step(mode: str) -> None:
    async with local_world(2) as nodes:
        for node in nodes:
            with pytest.raises(UsageError, match="tuning: expected None"):
                await train_tuned(node, TuningConfig(), mode)


async def train_all(
    size: int, mode: str, codec: str = "none", *, hosts: tuple[str, ...] | None = None
) -> list[Trained]:
    async with local_world(size, hosts=hosts) as nodes:
        return list(await asyncio.gather(*(train(node, mode, codec) for node in nodes)))


@cache
def last_loss_alone() -> float:
    model, batches, loss = LanguageModel(CONFIG), make_batches(), 0.0
    for step in range(CONFIG.steps):
        loss = model.accumulate(batches.windows(step), scale=1 / CONFIG.tokens) / CONFIG.tokens
        model.update(step)
    return loss


@pytest.mark.parametrize(
    ("mode", "codec"),
    [
        ("sync", "int8"),
        ("sync", "powersgd:2"),
        ("local:1", "none"),
        ("local:5", "none"),
        ("diloco:5:0.7:0.5", "int8"),
        ("diloco:5:0.7:0.5", "int4"),
        ("async", "none"),
        ("stale:2", "none"),
    ],
)
async def test_all_ranks_end_equal_and_near_one_process(mode: str, codec: str) -> None:
    first, *others = await train_all(3, mode, codec)
    losses = [report.loss for report in first.reports]
    assert [report.step for report in first.reports] == list(range(CONFIG.steps))
    assert losses[-1] < losses[0]
    assert losses[-1] == pytest.approx(last_loss_alone(), rel=0.25)
    for other in others:
        assert other.digest == first.digest
        assert [report.loss for report in other.reports] == losses


async def test_local_steps_are_silent_between_rounds() -> None:
    every, rarely = await train_all(2, "local:1"), await train_all(2, "local:11")
    assert (every[0].rounds, rarely[0].rounds) == (22, 2)
    assert every[0].sent == pytest.approx(11 * rarely[0].sent, rel=0.05)


async def test_the_last_steps_make_a_round_of_their_own() -> None:
    results = await train_all(2, "local:8")
    assert results[0].rounds == 3
    assert [len(result.reports) for result in results] == [22, 22]


async def test_hosts_go_their_own_ways_and_end_equal() -> None:
    results = await train_all(4, "hierarchical:6", "int8", hosts=("a", "a", "b", "b"))
    assert len({result.digest for result in results}) == 1
    assert [result.rounds for result in results] == [4, 0, 4, 0]
    assert results[0].reports[-1].loss == pytest.approx(last_loss_alone(), rel=0.25)


async def test_one_host_is_synchronous_training() -> None:
    hosts, ranks = await train_all(2, "hierarchical:6"), await train_all(2, "sync")
    np.testing.assert_allclose(
        [report.loss for report in hosts[0].reports], [report.loss for report in ranks[0].reports], rtol=1e-5
    )


async def test_a_world_of_one_trains_in_every_mode() -> None:
    for mode in ("sync", "local:4", "hierarchical:4", "async"):
        (result,) = await train_all(1, mode)
        assert result.reports[-1].loss == pytest.approx(last_loss_alone(), rel=1e-5)


async def test_updates_that_are_sent_as_they_are_take_no_codec() -> None:
    async with local_world(1) as (node,):
        with pytest.raises(UsageError, match="codec: async sends updates as they are, expected none, got int8"):
            await train(node, "async", "int8")


async def test_a_rank_that_fails_ends_the_others() -> None:
    async def main(node: Node) -> None:
        batches = make_batches()
        if node.rank == 1:
            batches = replace_corpus(batches)
        model = LanguageModel(CONFIG)
        setup = make_trainer(
            parse_mode("async"),
            model,
            batches,
            node=node,
            compression=GradientCompressionConfig(),
            bucketing=GradientBucketingConfig(),
        )
        async for _ in setup.trainer.run():
            pass

    async with local_world(2) as nodes:
        errors = await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True)
    assert all(isinstance(error, AsyncparError) for error in errors), errors


def replace_corpus(batches: Batches) -> Batches:
    """Return batches with bytes that the model does not know."""
    return Batches(np.full(500, 77, np.uint8), rows=batches.rows, length=batches.length, seed=1)


def test_evaluating_leaves_the_gradients_alone() -> None:
    model, windows = LanguageModel(replace(CONFIG, rows=4)), make_batches().windows(0)
    total = model.accumulate(windows, scale=1.0)
    before = [parameter.grad.copy() for parameter in model.model.parameters()]
    assert model.evaluate(windows) == pytest.approx(total / CONFIG.tokens)
    for parameter, gradient in zip(model.model.parameters(), before, strict=True):
        np.testing.assert_array_equal(parameter.grad, gradient)
