"""Dropout in a cut model: the same everywhere where activations are, its own where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.nn import Array, Transformer, TransformerConfig
from asyncpar.nn.tensor import SingleRankGroup, TensorGroup, TransformerStage, build_stage
from tests.nn.tensor.crew import run_ranks

CONFIG = TransformerConfig(vocabulary=9, length=6, features=12, layers=2, heads=6, seed=5, dtype="float64", dropout=0.3)
TOKENS = np.random.default_rng(0).integers(0, 9, (2, 6))


def build(group: TensorGroup, **options: Any) -> TransformerStage:
    return build_stage(CONFIG, layers=range(2), is_first=True, is_last=True, group=group, **options)


def forward(stage: TransformerStage) -> Array:
    return stage.forward(TOKENS)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_drop_what_one_process_drops(size: int) -> None:
    logits = np.concatenate(run_ranks(size, lambda group: forward(build(group))), axis=-1)
    np.testing.assert_allclose(logits, Transformer(CONFIG).forward(TOKENS)[0], rtol=1e-12)


def test_stages_drop_what_one_process_drops() -> None:
    first = build_stage(CONFIG, layers=range(1), is_first=True, is_last=False, group=SingleRankGroup())
    last = build_stage(CONFIG, layers=range(1, 2), is_first=False, is_last=True, group=SingleRankGroup())
    y, _ = last.forward(first.forward(TOKENS)[0])
    np.testing.assert_allclose(y, Transformer(CONFIG).forward(TOKENS)[0], rtol=1e-12)
    assert (len(first.generators()), len(last.generators())) == (3, 2)


def test_replicas_drop_other_values() -> None:
    assert not np.array_equal(
        forward(build(SingleRankGroup(), replica=0)), forward(build(SingleRankGroup(), replica=1))
    )


def test_with_sequence_parallelism_each_part_is_dropped_from_on_its_own() -> None:
    draws = run_ranks(2, lambda group: build(group, sequence_parallel=True).generators()[0].random())
    assert draws[0] != draws[1]


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_switched_off_it_is_the_model_without(sequence: bool) -> None:
    def run(group: TensorGroup) -> Array:
        stage = build(group, sequence_parallel=sequence)
        stage.with_blocks(stage.blocks).set_training(False)
        return forward(stage)

    plain = Transformer(replace(CONFIG, dropout=0.0))
    np.testing.assert_allclose(
        np.concatenate(run_ranks(3, run), axis=-1), plain.forward(TOKENS)[0], rtol=1e-12, atol=1e-14
    )
