"""Backward in two halves: first the input's gradient, later those of the parameters, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.nn import (
    Block,
    CausalSelfAttention,
    Embedding,
    Initializer,
    LayerNorm,
    Linear,
    Mlp,
    Sequential,
    Stage,
    Transformer,
    TransformerConfig,
)
from tests.nn.gradients import make_initializer

X = np.random.default_rng(7).normal(size=(2, 5, 6))
TOKENS = np.random.default_rng(7).integers(0, 11, (3, 4))
TINY = TransformerConfig(vocabulary=11, length=4, features=6, layers=2, heads=2, mlp_hidden=7)
TIED = TransformerConfig(vocabulary=11, length=4, features=6, layers=1, heads=3, tied_embeddings=True)

Make = Callable[[Initializer], Stage[Any]]

LAYERS: dict[str, tuple[Make, Any]] = {
    "linear": (lambda draw: Linear("linear", 6, 4, initializer=draw), X),
    "norm": (lambda draw: LayerNorm("norm", 6, initializer=draw), X),
    "embedding": (lambda draw: Embedding("embedding", 11, 6, max_length=9, initializer=draw), TOKENS),
    "attention": (lambda draw: CausalSelfAttention("attention", 6, 2, initializer=draw), X),
    "mlp": (lambda draw: Mlp("mlp", 6, 5, initializer=draw), X),
    "block": (lambda draw: Block("block", 6, 2, initializer=draw), X),
    "two blocks": (lambda draw: Sequential([Block(f"block{i}", 6, 2, initializer=draw) for i in range(2)]), X),
    "transformer": (lambda _: Transformer(TINY), TOKENS),
    "tied transformer": (lambda _: Transformer(TIED), TOKENS),
}


def gradients(stage: Stage[Any]) -> list[bytes]:
    return [parameter.grad.tobytes() for parameter in stage.parameters()]


@pytest.mark.parametrize("name", LAYERS)
def test_both_halves_together_are_the_whole_to_the_last_bit(name: str) -> None:
    make, x = LAYERS[name]
    whole, split = make(make_initializer()), make(make_initializer())
    reported: list[str] = []
    reported_later: list[str] = []
    y, saved = whole.forward(x)
    dy = np.random.default_rng(1).normal(size=y.shape).astype(y.dtype)
    dx = whole.backward(saved, dy, reported.append)

    _, saved = split.forward(x)
    same, deferred = split.backward_input(saved, dy)
    assert not any(np.frombuffer(gradient, np.uint8).any() for gradient in gradients(split))
    split.backward_weight(deferred, reported_later.append)
    assert deferred == []
    assert (None if dx is None else dx.tobytes()) == (None if same is None else same.tobytes())
    assert gradients(split) == gradients(whole)
    assert reported_later == reported
    assert sorted(reported) == sorted(parameter.name for parameter in whole.parameters())


@pytest.mark.parametrize("name", ["linear", "norm", "attention", "mlp", "block", "two blocks"])
def test_deferred_work_survives_changes_of_the_input_gradient(name: str) -> None:
    make, x = LAYERS[name]
    whole, split = make(make_initializer()), make(make_initializer())
    y, saved = whole.forward(x)
    whole.backward(saved, y)
    same, saved = split.forward(x)
    dx, deferred = split.backward_input(saved, same)
    assert dx is not None
    dx.fill(np.nan)
    split.backward_weight(deferred)
    assert gradients(split) == gradients(whole)


def test_micro_batches_may_be_finished_late_and_out_of_order_of_their_inputs() -> None:
    whole, split = Transformer(TINY), Transformer(TINY)
    flights = []
    for tokens in (TOKENS, TOKENS[::-1].copy(), TOKENS + 0):
        y, saved = whole.forward(tokens)
        whole.backward(saved, y)
        flights.append((split.forward(tokens)[1], y))
    waiting = [split.backward_input(saved, dy)[1] for saved, dy in reversed(flights)]
    for deferred in reversed(waiting):
        split.backward_weight(deferred)
    assert gradients(split) == gradients(whole)
