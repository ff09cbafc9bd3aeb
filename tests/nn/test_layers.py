"""Every layer's gradient is that of finite differences, and wrong shapes are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Block, CausalSelfAttention, Embedding, Initializer, LayerNorm, Linear, Mlp, Parameter, Stage
from asyncpar.nn.sequential import Sequential
from tests.nn.gradients import assert_gradients_match, make_initializer

SHAPE = (2, 5, 6)
X = np.random.default_rng(7).normal(size=SHAPE)
TOKENS = np.random.default_rng(7).integers(0, 11, (3, 4))


def make_linear(*, has_bias: bool = True) -> Linear:
    return Linear("linear", 6, 4, initializer=make_initializer(), has_bias=has_bias)


def make_embedding(*, vocabulary: int, max_length: int) -> Embedding:
    return Embedding("embedding", vocabulary, 6, max_length=max_length, initializer=make_initializer())


def test_linear_with_bias_differentiates() -> None:
    assert_gradients_match(make_linear(), X.copy())


def test_linear_without_bias_differentiates_and_has_one_parameter() -> None:
    stage = make_linear(has_bias=False)
    assert [parameter.name for parameter in stage.parameters()] == ["linear/weight"]
    assert_gradients_match(stage, X.copy())


def test_linear_takes_a_single_row() -> None:
    assert_gradients_match(make_linear(), X[0, 0].copy())


def test_embedding_differentiates_with_repeated_tokens() -> None:
    stage = make_embedding(vocabulary=11, max_length=9)
    assert len(np.unique(TOKENS)) < TOKENS.size
    assert_gradients_match(stage, TOKENS)


def test_layer_norm_differentiates() -> None:
    assert_gradients_match(LayerNorm("norm", 6, initializer=make_initializer()), X.copy())


def test_layer_norm_gives_mean_zero_and_variance_one() -> None:
    y, _ = LayerNorm("norm", 6, initializer=make_initializer(), epsilon=0.0).forward(X * 3 + 5)
    np.testing.assert_allclose(y.mean(axis=-1), 0.0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=-1), 1.0, rtol=1e-12)


def test_attention_differentiates() -> None:
    assert_gradients_match(CausalSelfAttention("attention", 6, 3, initializer=make_initializer()), X.copy())


def test_attention_does_not_look_ahead() -> None:
    stage = CausalSelfAttention("attention", 6, 2, initializer=make_initializer())
    changed = X.copy()
    changed[:, 3:] += 1.0
    before, _ = stage.forward(X)
    after, _ = stage.forward(changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert not np.allclose(before[:, 3:], after[:, 3:])


def test_mlp_differentiates() -> None:
    assert_gradients_match(Mlp("mlp", 6, 7, initializer=make_initializer()), X.copy())


def test_block_differentiates() -> None:
    assert_gradients_match(Block("block", 6, 2, initializer=make_initializer()), X.copy())


def test_backward_reports_later_layers_first() -> None:
    initializer = make_initializer()
    names = ["one", "two"]
    stage = Sequential([Linear(name, 6, 6, initializer=initializer) for name in names])
    y, saved = stage.forward(X)
    reported: list[str] = []
    stage.backward(saved, y, reported.append)
    assert reported == ["two/bias", "two/weight", "one/bias", "one/weight"]


def test_a_gradient_is_complete_when_it_is_reported() -> None:
    stage = Block("block", 6, 2, initializer=make_initializer())
    values = {parameter.name: parameter for parameter in stage.parameters()}
    y, saved = stage.forward(X)
    seen: dict[str, np.ndarray[Any, Any]] = {}
    stage.backward(saved, y, lambda name: seen.__setitem__(name, values[name].grad.copy()))
    for name, parameter in values.items():
        np.testing.assert_array_equal(seen[name], parameter.grad, err_msg=name)


def test_forward_and_backward_leave_their_arguments_alone() -> None:
    stage = Block("block", 6, 2, initializer=make_initializer())
    x, dy = X.copy(), X[::-1].copy()
    _, saved = stage.forward(x)
    stage.backward(saved, dy)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(dy, X[::-1])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everything_stays_in_the_chosen_dtype(dtype: str) -> None:
    stage = Block("block", 6, 2, initializer=Initializer.from_seed(0, dtype))
    y, saved = stage.forward(X.astype(dtype))
    dx = stage.backward(saved, y)
    assert dx is not None
    arrays = [y, dx, *(parameter.value for parameter in stage.parameters())]
    arrays += [parameter.grad for parameter in stage.parameters()]
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


def test_one_seed_gives_one_model() -> None:
    one, other = (Block("block", 6, 2, initializer=make_initializer(seed=3)) for _ in range(2))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(a.value, b.value)
    third = Block("block", 6, 2, initializer=make_initializer(seed=4))
    assert not np.array_equal(one.attention.project.weight.value, third.attention.project.weight.value)


@pytest.mark.parametrize(
    ("stage", "x", "message"),
    [
        (make_linear(), X[..., :5], r"linear: expected an input of shape \(\.\.\., 6\), got \(2, 5, 5\)"),
        (LayerNorm("norm", 4, initializer=make_initializer()), X, r"norm: expected an input of shape \(\.\.\., 4\)"),
        (CausalSelfAttention("attention", 6, 2, initializer=make_initializer()), X[0], r"attention: expected shape"),
        (make_embedding(vocabulary=11, max_length=3), TOKENS, r"embedding: expected shape \(batch, 1\.\.3\)"),
        (make_embedding(vocabulary=5, max_length=9), TOKENS, r"embedding: expected tokens 0\.\.4, got 0\.\.10"),
        (make_embedding(vocabulary=11, max_length=9), X, r"embedding: expected token numbers"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(stage: Stage[Any], x: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stage.forward(x)


def test_an_output_gradient_of_another_shape_is_refused() -> None:
    stage = make_linear()
    _, saved = stage.forward(X)
    with pytest.raises(UsageError, match=r"linear: expected an output gradient of shape \(2, 5, 4\), got \(2, 5, 6\)"):
        stage.backward(saved, X)


def test_heads_that_do_not_divide_the_features_are_refused() -> None:
    with pytest.raises(UsageError, match="attention: expected heads that divide 6 features, got 4"):
        CausalSelfAttention("attention", 6, 4, initializer=make_initializer())


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two parameters are named 'linear/weight'"):
        Sequential([make_linear(), make_linear()])


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="stages: expected at least one stage"):
        Sequential([])


def test_a_stage_without_input_gradient_must_come_first() -> None:
    initializer = make_initializer()
    first = Linear("linear", 4, 11, initializer=initializer)
    embedding = Embedding("embedding", 11, 6, max_length=9, initializer=initializer)
    with pytest.raises(UsageError, match="only the first stage"):
        Sequential([first, embedding]).backward([np.ones((3, 4)), TOKENS], np.ones((3, 4, 6)))


def test_parameters_must_be_floating() -> None:
    with pytest.raises(UsageError, match="parameter p: expected a floating dtype, got int64"):
        Parameter("p", np.arange(3))  # type: ignore[arg-type]


def test_half_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype: expected float32 or float64, got float16"):
        Initializer.from_seed(0, "float16")
