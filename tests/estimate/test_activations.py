"""Activation memory by the published formulas."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.errors import UsageError
from asyncpar.estimate.activations import ActivationModel, kept_layers
from asyncpar.estimate.job import ModelShape

S, B, H, A, V = 2048, 3, 12288, 96, 51200
GPT3 = ModelShape(layers=96, hidden=H, heads=A, vocabulary=V, sequence=S)
SBH = S * B * H


def model(**settings: Any) -> ActivationModel:
    return ActivationModel(**{"shape": GPT3, "micro_batch_size": B, **settings})


def test_a_layer_keeps_34_and_the_scores() -> None:
    assert model().layer == SBH * (34 + 5 * A * S / H)
    assert 5 * A * S / H == 80


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_tensor_parallel_ranks_keep_ten_whole_and_the_rest_in_parts(t: int) -> None:
    assert model(tp_size=t).layer == pytest.approx(SBH * (10 + 24 / t + 5 * A * S / (H * t)), rel=1e-15)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_sequence_parallel_ranks_keep_everything_in_parts(t: int) -> None:
    sequence_parallel = model(tp_size=t, sequence_parallel=True)
    assert sequence_parallel.layer == pytest.approx(SBH / t * (34 + 5 * A * S / H), rel=1e-15)
    assert sequence_parallel.recomputed_layer == 2 * SBH / t


def test_a_recomputed_layer_keeps_its_input() -> None:
    assert model(tp_size=8).recomputed_layer == 2 * SBH


def test_the_end_of_the_model_keeps_inputs_and_logits() -> None:
    assert model().output_end == pytest.approx(4 * SBH * (1 + V / H), rel=1e-15)
    assert model().input_end == SBH


def test_values_of_four_bytes_take_twice_as_much_but_masks_do_not() -> None:
    single = model(value_bytes=4, tp_size=4)
    assert single.layer == pytest.approx(SBH * (18 + 48 / 4 + 9 * A * S / (H * 4)), rel=1e-15)
    assert single.recomputed_layer == 4 * SBH


def test_some_layers_of_a_stage_may_be_recomputed() -> None:
    assert model().layers(5, kept=2) == 2 * model().layer + 3 * model().recomputed_layer


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [("basic", [1, 2, 3, 4, 5, 8]), ("standard", [1, 1, 2, 2, 3, 4]), ("aggressive", [1, 1, 1, 1, 2, 2])],
)
def test_strategies_keep_every_layer_or_every_second_or_fourth(strategy: str, kept: list[int]) -> None:
    found = [kept_layers(MemoryOptimizationStrategy(strategy), layers) for layers in (1, 2, 3, 4, 5, 8)]
    assert found == kept


def test_checkpointing_everything_keeps_no_layer() -> None:
    assert kept_layers(MemoryOptimizationStrategy.BASIC, 8, recompute_all=True) == 0


@pytest.mark.parametrize("name", ["micro_batch_size", "tp_size", "value_bytes"])
def test_sizes_of_zero_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected a positive number, got 0"):
        model(**{name: 0})
