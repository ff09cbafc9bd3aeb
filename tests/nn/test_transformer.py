"""The language model as a whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Transformer, TransformerConfig, softmax_cross_entropy
from asyncpar.nn.optimizers import AdamW, Optimizer
from tests.nn.gradients import assert_gradients_match, differentiate, relative_error
from tests.soak import chosen

TOKENS = np.array([[0, 3, 6, 3], [5, 1, 1, 2]])
TINY = TransformerConfig(vocabulary=7, length=4, features=4, layers=2, heads=2, dtype="float64")


def test_the_whole_model_differentiates() -> None:
    assert_gradients_match(Transformer(TINY), TOKENS)


def test_with_tied_embeddings_one_table_gets_the_gradients_of_both_ends() -> None:
    model = Transformer(replace(TINY, tied_embeddings=True))
    names = [parameter.name for parameter in model.parameters()]
    assert names[0] == "embedding/tokens"
    assert names[-1] == "norm/shift"
    assert model.parameter_count == Transformer(TINY).parameter_count - 4 * 7
    assert_gradients_match(model, TOKENS)


def test_a_tied_table_is_reported_last() -> None:
    model = Transformer(replace(TINY, tied_embeddings=True))
    logits, saved = model.forward(TOKENS)
    reported: list[str] = []
    model.backward(saved, logits, reported.append)
    assert reported[-1] == "embedding/tokens"
    assert len(set(reported)) == len(reported) == len(model.parameters())


def test_the_width_of_perceptrons_may_be_anything() -> None:
    model = Transformer(replace(TINY, mlp_hidden=5))
    shapes = {parameter.name: parameter.shape for parameter in model.parameters()}
    assert shapes["block1/mlp/widen/weight"] == (4, 5)
    assert shapes["block1/mlp/narrow/weight"] == (5, 4)


def test_dropout_is_drawn_anew_every_time_and_can_be_switched_off() -> None:
    plain, model, same = (Transformer(replace(TINY, dropout=rate)) for rate in (0.0, 0.3, 0.3))
    outputs = [model.forward(TOKENS)[0] for _ in range(2)]
    assert not np.array_equal(outputs[0], outputs[1])
    for expected in outputs:
        np.testing.assert_array_equal(same.forward(TOKENS)[0], expected)
    assert len(model.generators()) == 1 + 2 * TINY.layers
    model.set_training(False)
    np.testing.assert_array_equal(model.forward(TOKENS)[0], plain.forward(TOKENS)[0])


def test_every_dropout_layer_drops_other_values() -> None:
    model = Transformer(replace(TINY, dropout=0.5))
    draws = [generator.random() for generator in model.generators()]
    assert len(set(draws)) == len(draws)


def test_what_was_dropped_gets_no_gradient() -> None:
    model = Transformer(replace(TINY, dropout=0.4, layers=chosen(1, soak=2)))
    states = [generator.bit_generator.state for generator in model.generators()]

    def forward() -> Any:
        for generator, state in zip(model.generators(), states, strict=True):
            generator.bit_generator.state = state
        return model.forward(TOKENS)

    logits, saved = forward()
    weights = np.random.default_rng(0).normal(size=logits.shape)
    model.backward(saved, weights)
    for parameter in model.parameters():
        expected = differentiate(lambda: float((forward()[0] * weights).sum()), parameter.value)
        assert relative_error(parameter.grad, expected) < 1e-5, parameter.name


def test_the_first_loss_is_near_that_of_guessing() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (4, 33))
    model = Transformer(TransformerConfig(length=32, features=32))
    logits, _ = model.forward(tokens[:, :-1])
    loss, _ = softmax_cross_entropy(logits, tokens[:, 1:], scale=1.0)
    assert loss / tokens[:, 1:].size == pytest.approx(math.log(256), abs=0.1)


def test_a_repeating_text_is_learned() -> None:
    model = Transformer(TransformerConfig(vocabulary=8, length=8, features=16, layers=1, heads=2))
    optimizer = Optimizer(model.parameters(), AdamW())
    tokens = np.tile(np.array([1, 5, 2, 7, 0]), 20).reshape(-1, 10)[:, :9]
    losses = []
    for _ in range(60):
        logits, saved = model.forward(tokens[:, :-1])
        loss, gradient = softmax_cross_entropy(logits, tokens[:, 1:], scale=1 / tokens[:, 1:].size)
        losses.append(loss / tokens[:, 1:].size)
        model.zero_grad()
        model.backward(saved, gradient)
        optimizer.step(0.01)
    assert losses[0] > 1.9
    assert losses[-1] < 0.05


def test_parameters_come_in_forward_order_with_unique_names() -> None:
    names = [parameter.name for parameter in Transformer(TINY).parameters()]
    assert len(set(names)) == len(names)
    assert names[0] == "embedding/tokens"
    assert names[-1] == "head/weight"
    assert names.index("block0/mlp/widen/weight") < names.index("block1/attention/project/weight")


def test_no_parameter_has_a_gradient_that_is_always_zero() -> None:
    model = Transformer(TINY)
    logits, saved = model.forward(np.array([[0, 1, 2, 3], [4, 5, 6, 0]]))
    _, gradient = softmax_cross_entropy(logits, np.array([[1, 2, 3, 4], [5, 6, 0, 1]]), scale=1.0)
    model.backward(saved, gradient)
    for parameter in model.parameters():
        assert np.abs(parameter.grad).max() > 1e-9, parameter.name


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"features": 10, "heads": 4}, "heads: expected a divisor of 10 features, got 4"),
        ({"layers": 0}, "layers must be a positive integer, got 0"),
        ({"mlp_hidden": 0}, "mlp_hidden must be a positive integer, got 0"),
        ({"dropout": 1.0}, "dropout: expected 0 <= dropout < 1, got 1.0"),
        ({"dropout": math.nan}, "dropout: expected 0 <= dropout < 1, got nan"),
        ({"dtype": "int8"}, "dtype: expected float32 or float64, got int8"),
    ],
)
def test_wrong_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TransformerConfig(**setting)
