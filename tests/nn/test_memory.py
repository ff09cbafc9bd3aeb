"""Layers use the memory of earlier steps again, and nothing that is still held changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.core.array_pool import LEAST_BYTES, ArrayPool
from asyncpar.nn import Array, Stage, Transformer, TransformerConfig, softmax_cross_entropy
from asyncpar.nn.tensor import SingleRankGroup, build_stage

CONFIG = TransformerConfig(vocabulary=64, length=32, features=64, layers=2, heads=4, dropout=0.1)
TOKENS = np.random.default_rng(5).integers(0, 64, (64, 33))

Make = Callable[[], Stage[list[Any]]]


def make_stage() -> Stage[list[Any]]:
    return build_stage(CONFIG, layers=range(2), is_first=True, is_last=True, group=SingleRankGroup())


MODELS: dict[str, Make] = {"a transformer": lambda: Transformer(CONFIG), "a stage of one": make_stage}


def memory_of(model: Stage[Any]) -> ArrayPool:
    found: list[ArrayPool] = [
        parts.memory for parts in (model, *getattr(model, "stages", ())) if parts.memory is not None
    ]
    assert all(memory is found[0] for memory in found), "the layers of a model share their memory"
    return found[0]


def take_step(model: Stage[list[Any]]) -> Array:
    model.zero_grad()
    logits, saved = model.forward(TOKENS[:, :-1])
    _, gradient = softmax_cross_entropy(logits, TOKENS[:, 1:], scale=1.0 / 2048)
    model.backward(saved, gradient)
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_steps_hold_no_more_memory_than_the_first_had_at_once(name: str) -> None:
    model = MODELS[name]()
    memory = memory_of(model)
    take_step(model)
    made, most = memory.blocks_made, memory.most_lent_bytes
    assert most > 20 * LEAST_BYTES
    for _ in range(3):
        take_step(model)
        assert memory.idle_bytes > most // 2
        assert memory.lent_bytes + memory.idle_bytes <= most
    assert memory.most_lent_bytes == most
    assert memory.blocks_made < 2 * made


@pytest.mark.parametrize("name", MODELS)
def test_results_that_are_held_stay_as_they_are(name: str) -> None:
    model = MODELS[name]()
    held = take_step(model)
    kept = held.copy()
    for _ in range(2):
        take_step(model)
    np.testing.assert_array_equal(held, kept)


@pytest.mark.parametrize("name", MODELS)
def test_memory_that_is_used_again_changes_no_bit(name: str) -> None:
    model, other = MODELS[name](), MODELS[name]()
    other.use_memory(ArrayPool())
    for _ in range(3):
        assert take_step(model).tobytes() == take_step(other).tobytes()
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert one.grad.tobytes() == same.grad.tobytes()
