"""Parameters and arithmetic of a model, against published figures and our own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncpar.errors import UsageError
from asyncpar.estimate.job import ModelShape
from asyncpar.nn.transformer import Transformer, TransformerConfig

ANCHORS = json.loads((Path(__file__).parents[1] / "goldens" / "memory_anchors.json").read_text())


def shape(**settings: Any) -> ModelShape:
    return ModelShape(
        **{"layers": 2, "hidden": 12, "heads": 3, "vocabulary": 50, "sequence": 8, "has_query_bias": True, **settings}
    )


@pytest.mark.parametrize("model", ANCHORS["megatron_sc21_table1"], ids=lambda model: f"{model['B']}B")
def test_models_of_megatron_have_the_published_size(model: dict[str, Any]) -> None:
    gpt = ModelShape(
        layers=model["layers"], hidden=model["hidden"], heads=model["heads"], vocabulary=51200, sequence=2048
    )
    assert round(gpt.published_parameters / 1e9, 1) == model["B"]
    assert gpt.parameters == gpt.published_parameters + 2 * gpt.hidden


@pytest.mark.parametrize("model", ANCHORS["megatron_sc21_table1"], ids=lambda model: f"{model['B']}B")
def test_the_published_formula_is_the_golden_one(model: dict[str, Any]) -> None:
    layers, hidden, vocabulary, sequence = model["layers"], model["hidden"], 51200, 2048
    gpt = ModelShape(layers=layers, hidden=hidden, heads=model["heads"], vocabulary=vocabulary, sequence=sequence)
    golden = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))
    assert gpt.published_parameters == pytest.approx(golden, rel=1e-12)


def test_our_own_model_is_counted_exactly() -> None:
    config = TransformerConfig(vocabulary=37, length=11, features=24, layers=3, heads=4)
    mine = ModelShape(layers=3, hidden=24, heads=4, vocabulary=37, sequence=11, is_tied=False, has_query_bias=False)
    assert mine.parameters == Transformer(config).parameter_count


def test_a_layer_has_twelve_squares_and_thirteen_vectors() -> None:
    assert shape().layer_parameters() == 12 * 12**2 + 13 * 12


def test_norms_and_row_parallel_biases_are_whole_on_each_rank() -> None:
    whole, cut = shape().layer_parameters(), shape().layer_parameters(3)
    replicated = 6 * 12
    assert 3 * (cut - replicated) == whole - replicated


def test_an_odd_vocabulary_is_counted_where_it_is_most() -> None:
    assert shape(vocabulary=101).embedding_parameters(4) == 26 * 12


def test_a_wider_perceptron_counts() -> None:
    more = shape(ffn_multiple=5).layer_parameters() - shape().layer_parameters()
    assert more == 2 * 12 * 12 + 12


def test_an_iteration_takes_the_published_arithmetic() -> None:
    layers, hidden, sequence, vocabulary, batch = 24, 2304, 2048, 51200, 512
    gpt = ModelShape(layers=layers, hidden=hidden, heads=24, vocabulary=vocabulary, sequence=sequence)
    with_recomputation = batch * sequence * (4 * layers * gpt.layer_flops + 3 * gpt.head_flops)
    published = 96.0 * batch * sequence * layers * hidden**2
    published *= 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert with_recomputation == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "vocabulary", "sequence", "ffn_multiple"])
def test_sizes_of_zero_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected a positive number, got 0"):
        shape(**{name: 0})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="heads: expected a divisor of hidden = 12, got 5"):
        shape(heads=5)
