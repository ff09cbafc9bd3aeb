"""A transformer cut over tensor-parallel ranks and pipeline stages is the one of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from asyncpar.nn import Array, Parameter, Transformer, TransformerConfig, softmax_cross_entropy
from asyncpar.nn.half import HalfInitializer, HalfParameter
from asyncpar.nn.tensor import SingleRankGroup, TensorGroup, TransformerStage, build_stage, vocab_parallel_cross_entropy
from tests.nn.tensor.crew import run_ranks, whole_gradients
from tests.products import sampled

CONFIG = TransformerConfig(
    vocabulary=23, length=7, features=24, layers=3, heads=12, mlp_hidden=17, seed=5, dtype="float64"
)
"""Nothing but the heads divides by 2, 3 or 4."""

BATCHES = np.random.default_rng(0).integers(0, 23, (2, 3, 8))
SCALE = 1 / 42
WHOLE = (range(3),)
SPLIT = (range(1), range(1, 3))
ENDS = (range(0), range(2), range(2, 3), range(3, 3))
SPLITS = {WHOLE: "one stage", SPLIT: "two stages", ENDS: "embedding and head alone"}


@dataclass(frozen=True)
class Ran:
    """What two micro-batches came to on a rank."""

    losses: list[float]
    stages: list[list[Parameter]]


def stages_of(
    config: TransformerConfig, split: Sequence[range], group: TensorGroup, **options: Any
) -> list[TransformerStage]:
    last = len(split) - 1
    return [
        build_stage(config, layers=layers, is_first=i == 0, is_last=i == last, group=group, **options)
        for i, layers in enumerate(split)
    ]


def run_stages(config: TransformerConfig, stages: Sequence[TransformerStage], group: TensorGroup) -> list[float]:
    """Run both micro-batches forward, then both backward, each stage alone, and return the losses."""
    losses, flights = [], []
    for tokens in BATCHES:
        x: Array = tokens[:, :-1]
        flight = []
        for stage in stages:
            x, saved = stage.forward(x)
            flight.append(saved)
        loss, dy = vocab_parallel_cross_entropy(
            x, tokens[:, 1:], vocabulary=config.vocabulary, group=group, scale=SCALE
        )
        losses.append(loss)
        flights.append((flight, dy))
    for flight, dy in flights:
        gradient: Array | None = dy
        for stage in reversed(stages):
            assert gradient is not None
            gradient = stage.backward(flight.pop(), gradient)
        assert gradient is None
    return losses


def run_whole(config: TransformerConfig) -> tuple[list[float], Transformer]:
    model, losses = Transformer(config), []
    for tokens in BATCHES:
        logits, saved = model.forward(tokens[:, :-1])
        loss, gradient = softmax_cross_entropy(logits, tokens[:, 1:], scale=SCALE)
        losses.append(loss)
        model.backward(saved, gradient)
    return losses, model


def gradients_of(config: TransformerConfig, ran: Sequence[Ran]) -> dict[str, Array]:
    """Return whole gradients; those of a tied table are added over the first and the last stage."""
    total: dict[str, Array] = {}
    for stage in range(len(ran[0].stages)):
        for name, gradient in whole_gradients([one.stages[stage] for one in ran]).items():
            assert name not in total or name == "embedding/tokens"
            total[name] = total[name] + gradient if name in total else gradient
    return total


def describe(value: object) -> str | None:
    """Return the name of a split; what else there is names itself."""
    return SPLITS.get(value) if isinstance(value, tuple) else None


def run_cut(config: TransformerConfig, split: Sequence[range], size: int, **options: Any) -> list[Ran]:
    def run(group: TensorGroup) -> Ran:
        stages = stages_of(config, split, group, **options)
        losses = run_stages(config, stages, group)
        return Ran(losses, [list(stage.local_parameters()) for stage in stages])

    return run_ranks(size, run)


def assert_equal_to_whole(config: TransformerConfig, ran: Sequence[Ran], tolerance: float) -> None:
    losses, model = run_whole(config)
    for one in ran:
        assert one.losses == ran[0].losses
    np.testing.assert_allclose(ran[0].losses, losses, rtol=tolerance)
    gradients = gradients_of(config, ran)
    assert sorted(gradients) == sorted(parameter.name for parameter in model.parameters())
    for parameter in model.parameters():
        bound = tolerance * np.abs(parameter.grad).max()
        np.testing.assert_allclose(gradients[parameter.name], parameter.grad, atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("size", "sequence", "tied", "split"),
    sampled([1, 2, 3, 4], [False, True], [False, True], [WHOLE, SPLIT, ENDS]),
    ids=describe,
)
def test_losses_and_gradients_are_those_of_one_process(
    size: int, sequence: bool, tied: bool, split: tuple[range, ...]
) -> None:
    config = replace(CONFIG, tied_embeddings=tied)
    ran = run_cut(config, split, size, sequence_parallel=sequence)
    assert_equal_to_whole(config, ran, 1e-12)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("size", [2, 3])
def test_losses_in_single_precision_are_those_of_one_process(size: int, sequence: bool) -> None:
    config = replace(CONFIG, dtype="float32")
    ran = run_cut(config, SPLIT, size, sequence_parallel=sequence)
    losses, _ = run_whole(config)
    np.testing.assert_allclose(ran[0].losses, losses, rtol=1e-6)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_one_rank_computes_the_bits_of_one_process(tied: bool, sequence: bool) -> None:
    config = replace(CONFIG, tied_embeddings=tied, dtype="float32")
    whole = Transformer(config)
    (stage,) = stages_of(config, WHOLE, SingleRankGroup(), sequence_parallel=sequence)
    for model in (whole, stage):
        logits, saved = model.forward(BATCHES[0, :, :-1])
        _, dy = softmax_cross_entropy(logits, BATCHES[0, :, 1:], scale=SCALE)
        model.backward(saved, dy)
    for own, expected in zip(stage.parameters(), whole.parameters(), strict=True):
        assert own.name == expected.name
        np.testing.assert_array_equal(own.value, expected.value)
        np.testing.assert_array_equal(own.grad, expected.grad)


def reports_of(stage: TransformerStage, x: Any) -> list[str]:
    y, saved = stage.forward(x)
    reported: list[str] = []
    stage.backward(saved, y, reported.append)
    return reported


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("split", [WHOLE, SPLIT], ids=["one stage", "two stages"])
def test_each_stage_reports_each_of_its_parameters_once(tied: bool, split: tuple[range, ...]) -> None:
    x: Any = BATCHES[0, :, :-1]
    for stage in stages_of(replace(CONFIG, tied_embeddings=tied), split, SingleRankGroup()):
        assert sorted(reports_of(stage, x)) == sorted(parameter.name for parameter in stage.parameters())
        x, _ = stage.forward(x)


def test_a_table_that_two_stages_of_a_rank_share_is_reported_by_the_first_stage() -> None:
    config = replace(CONFIG, tied_embeddings=True)
    first = build_stage(config, layers=range(1), is_first=True, is_last=False, group=SingleRankGroup())
    table = first.parameters()[0]
    last = build_stage(config, layers=range(1, 3), is_first=False, is_last=True, group=SingleRankGroup(), table=table)
    x, _ = first.forward(BATCHES[0, :, :-1])
    assert table.name not in reports_of(last, x)
    assert reports_of(first, BATCHES[0, :, :-1])[-1] == table.name


def test_parameters_in_half_precision_are_cut_alike() -> None:
    config = replace(CONFIG, dtype="float32")
    draw = HalfInitializer.from_seed
    logits, _ = Transformer(config, draw(config.seed)).forward(BATCHES[0, :, :-1])
    expected, _ = softmax_cross_entropy(logits, BATCHES[0, :, 1:], scale=SCALE)

    def run(group: TensorGroup) -> float:
        (stage,) = stages_of(config, WHOLE, group, initializer=draw(config.seed))
        assert all(isinstance(parameter, HalfParameter) for parameter in stage.parameters())
        return run_stages(config, [stage], group)[0]

    losses = run_ranks(3, run)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(expected, rel=1e-6)
