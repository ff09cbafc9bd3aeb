"""Numbers that are not finite, half precision with loss scaling, and what counts in the mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.hybrid import LossScaling, Precision, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import Transformer, softmax_cross_entropy
from asyncpar.nn.half import stored_dtype
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.faults import Fault, FaultyModel, Moment
from tests.hybrid.ranks import Ranks, assert_has_taken, outcomes_of, running
from tests.hybrid.worlds import RATE, TINY, Array, make_config
from tests.products import in_turn
from tests.soak import chosen

MODEL = replace(TINY, layers=2, heads=2, tied_embeddings=True)
SINGLE = replace(MODEL, dtype="float32")
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
FEW = [(2, 1, 1), (1, 2, 2), (2, 1, 2)]
SCALING = LossScaling(initial=64.0, interval=1000)
MORE = chosen(1, soak=2)
"""Steps after a checkpoint."""


def spoil(value: float) -> Callable[[Array], None]:
    def write(x: Array) -> None:
        x.reshape(-1)[0] = value

    return write


def faulty_on(rank: int, fault: Fault, model: TransformerModel) -> Callable[[int], FaultyModel]:
    return lambda each: FaultyModel(model=model, fault=fault if each == rank else Fault())


@pytest.mark.parametrize(("layout", "stage", "value"), in_turn(LAYOUTS, ZeROStage, [np.nan, np.inf]))
async def test_what_is_not_finite_on_one_rank_is_an_error_on_all_and_changes_nothing(
    layout: tuple[int, int, int], stage: ZeROStage, value: float
) -> None:
    culprit = math.prod(layout) - 1
    fault = Fault(what=spoil(value))
    config = make_config(*layout, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage), clip_norm=0.3)
    async with running(MODEL, config, faulty_on(culprit, fault, TransformerModel(config=MODEL))) as ranks:
        await ranks.take_step()
        for moment in (Moment.LOSS, Moment.BACKWARD):
            fault.at = moment
            outcomes = await outcomes_of(ranks.start())
            assert [type(outcome) for outcome in outcomes] == [NonFiniteValue] * len(outcomes), outcomes
            if stage is ZeROStage.NONE and layout[1:] == (1, 1):  # else it spreads before it is looked for
                assert {f"rank {culprit} has NaN or infinity in" in str(outcome) for outcome in outcomes} == {True}
            fault.at = None
            assert {one.steps for one in ranks.all} == {1}
            assert_has_taken(ranks, 1)
        await ranks.take_step()
        assert_has_taken(ranks, 2)


@pytest.mark.parametrize(("stage", "layout"), in_turn(ZeROStage, FEW))
async def test_an_overflow_on_one_rank_makes_all_skip_the_step_and_halve_the_scale(
    layout: tuple[int, int, int], stage: ZeROStage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asyncpar.hybrid")
    culprit = math.prod(layout) - 1
    fault = Fault(what=spoil(np.inf))
    config = make_config(
        *layout,
        layers=2,
        micro_batches=2,
        zero=ZeROConfig(stage=stage),
        precision=Precision.FLOAT16,
        loss_scaling=SCALING,
    )
    async with running(SINGLE, config, faulty_on(culprit, fault, TransformerModel(config=SINGLE))) as ranks:
        await ranks.take_step()
        before = ranks.values()
        fault.at = Moment.LOSS
        results = await outcomes_of(ranks.start())
        assert all(result.is_skipped for result in results), results
        assert {result.why for result in results} == {f"rank {culprit} has NaN or infinity in the gradient of the loss"}
        assert f"step 1 is skipped: rank {culprit} has NaN" in caplog.text
        assert {one.loss_scale for one in ranks.all} == {32.0}
        assert {one.steps for one in ranks.all} == {2}
        for key, values in ranks.values().items():
            np.testing.assert_array_equal(values, before[key])
        fault.at = None
        for result in await outcomes_of(ranks.start()):
            assert (result.is_skipped, result.why) == (False, "")
        assert {one.loss_scale for one in ranks.all} == {32.0}


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16])
async def test_half_precision_learns_and_layouts_agree(precision: Precision) -> None:
    """Rounding to half precision differs by layout, as partial sums are stored; the master values hardly do."""
    runs = []
    spread = list(zip([(1, 1, 1), *FEW], ZeROStage, strict=True))
    for layout, stage in chosen([spread[0], spread[2 + (precision is Precision.FLOAT16)]], soak=spread):
        config = make_config(
            *layout, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage), precision=precision, clip_norm=1.0
        )
        async with running(SINGLE, config) as ranks:
            losses = [(await ranks.take_step())[0] for _ in range(6)]
            assert {stored_dtype(one) for one in ranks.all[0].parameters()} == {precision.storage}
        assert losses[-1] < losses[0] - 0.05
        runs.append(losses)
    np.testing.assert_allclose(runs, [runs[0]] * len(runs), rtol=5e-3)


@pytest.mark.parametrize(
    ("stage", "precision"), in_turn([ZeROStage.NONE, ZeROStage.STAGE2], [Precision.BFLOAT16, Precision.FLOAT16])
)
async def test_master_values_and_the_scale_survive_checkpoints(
    precision: Precision, stage: ZeROStage, tmp_path: Path
) -> None:
    config = make_config(
        2, 1, 2, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage), precision=precision, loss_scaling=SCALING
    )
    async with running(SINGLE, config) as ranks:
        await ranks.take_step()
        await every(ranks, lambda one: one.save(tmp_path))
        saved = ranks.values()
        expected = [(await ranks.take_step())[0] for _ in range(MORE)]
    assert any(not np.array_equal(value, value.astype(precision.storage)) for value in saved.values()), "no masters"
    async with running(SINGLE, config) as ranks:
        await every(ranks, lambda one: one.load(tmp_path))
        for key, values in ranks.values().items():
            np.testing.assert_array_equal(values, saved[key])
        assert [(await ranks.take_step())[0] for _ in range(MORE)] == expected


async def every(ranks: Ranks, main: Callable[[ThreeDParallelismCoordinator], Coroutine[Any, Any, Any]]) -> list[Any]:
    outcomes = await outcomes_of(ranks.start(main))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


IGNORED = -1


def padded_batch(rows: int) -> tuple[Array, Array]:
    """Return tokens, and targets of which many do not count: all of the last rows, and some of the others."""
    random = np.random.default_rng(5)
    tokens = random.integers(0, MODEL.vocabulary, (rows, MODEL.length))
    targets = random.integers(0, MODEL.vocabulary, (rows, MODEL.length))
    targets[random.random(targets.shape) < 0.3] = IGNORED
    targets[rows // 2 :] = IGNORED
    return tokens, targets


@pytest.mark.parametrize(("layout", "stage"), in_turn(LAYOUTS, ZeROStage))
async def test_the_mean_is_over_tokens_that_count_however_they_are_spread(
    layout: tuple[int, int, int], stage: ZeROStage
) -> None:
    """Micro-batches have one row and three, and one of two replicas has nothing that counts."""
    rows, dp = 8, layout[0]
    tokens, targets = padded_batch(rows)
    transformer = Transformer(MODEL)
    logits, saved = transformer.forward(tokens)
    flat = targets.reshape(-1) != IGNORED
    count = int(flat.sum())
    loss, some = softmax_cross_entropy(
        logits.reshape(-1, MODEL.vocabulary)[flat], targets.reshape(-1)[flat], scale=1.0 / count
    )
    gradient = np.zeros((flat.size, MODEL.vocabulary))
    gradient[flat] = some
    transformer.backward(saved, gradient.reshape(logits.shape))
    norm = math.sqrt(math.fsum(float(np.vdot(one.grad, one.grad)) for one in distinct(transformer)))

    config = make_config(*layout, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage))
    model = TransformerModel(config=MODEL, ignore_index=IGNORED)

    async def main(one: ThreeDParallelismCoordinator) -> Any:
        replica = one.groups.mapping.dp_rank
        own = slice(replica * rows // dp, (replica + 1) * rows // dp)
        cut = [1]
        return await one.train_step(np.split(tokens[own], cut), np.split(targets[own], cut), learning_rate=RATE)

    async with running(MODEL, config, lambda rank: model) as ranks:
        for result in await every(ranks, main):
            assert result.tokens == count
            assert result.loss == pytest.approx(loss / count, rel=1e-12)
            assert result.gradient_norm == pytest.approx(norm, rel=1e-12)


def distinct(transformer: Transformer) -> list[Any]:
    return list({id(one): one for one in transformer.parameters()}.values())


async def test_a_batch_in_which_nothing_counts_is_refused_on_all_ranks() -> None:
    model = TransformerModel(config=MODEL, ignore_index=IGNORED)

    async def main(one: ThreeDParallelismCoordinator) -> Any:
        tokens = [np.zeros((1, MODEL.length), int)]
        return await one.train_step(tokens, [np.full((1, MODEL.length), IGNORED)], learning_rate=RATE)

    async with running(MODEL, make_config(2, 1, 2, layers=2), lambda rank: model) as ranks:
        for outcome in await outcomes_of(ranks.start(main)):
            assert isinstance(outcome, UsageError)
            assert "targets: expected at least one that counts" in str(outcome)
