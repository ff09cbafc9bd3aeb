"""Slices cover everything once, and what layers compute does not depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.nn.attention import AttentionHeads
from asyncpar.nn.mlp import Gelu
from asyncpar.nn.slices import SLICE, slices
from tests.nn.gradients import assert_gradients_match


def test_slices_cover_all_items_in_order() -> None:
    parts = list(slices(10, SLICE // 4))
    assert parts == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_an_item_larger_than_a_slice_is_one() -> None:
    assert list(slices(2, 3 * SLICE)) == [slice(0, 1), slice(1, 2)]


def test_nothing_has_no_slices() -> None:
    assert list(slices(0, 5)) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_has_the_same_bits_in_slices_of_any_size(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    rng = np.random.default_rng(2)
    heads = AttentionHeads("heads", 2, 4)
    x, dy = rng.normal(size=(5, 7, 24)).astype(dtype), rng.normal(size=(5, 7, 8)).astype(dtype)
    results = []
    for size in (1, 2 * 2 * 7 * 7, SLICE):
        monkeypatch.setattr("asyncpar.nn.slices.SLICE", size)
        y, saved = heads.forward(x)
        results.append((y.tobytes(), heads.input_gradient(saved, dy).tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_has_the_same_bits_in_slices_of_any_size(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    x, dy = np.random.default_rng(2).normal(0.0, 3.0, (2, 5, 7, 11)).astype(dtype)
    results = []
    for size in (1, 9, 64, SLICE):
        monkeypatch.setattr("asyncpar.nn.slices.SLICE", size)
        y, slope = Gelu("gelu").forward(x)
        results.append((y.tobytes(), Gelu("gelu").input_gradient(slope, dy).tobytes()))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("at", [0.0, 20.0, -20.0])
def test_gelu_differentiates_near_zero_and_far_from_it(monkeypatch: pytest.MonkeyPatch, at: float) -> None:
    monkeypatch.setattr("asyncpar.nn.slices.SLICE", 4)
    x = at + np.random.default_rng(3).normal(size=(3, 5))
    y, slope = Gelu("gelu").forward(x)
    step = 1e-6
    expected = (Gelu("gelu").forward(x + step)[0] - Gelu("gelu").forward(x - step)[0]) / (2 * step)
    np.testing.assert_allclose(y, x * (at > 0) if at else y, atol=1e-12)
    np.testing.assert_allclose(slope, expected, atol=1e-8)


def test_attention_in_several_slices_differentiates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.nn.slices.SLICE", 2 * 3 * 4 * 4)
    assert_gradients_match(AttentionHeads("heads", 3, 2), np.random.default_rng(3).normal(size=(5, 4, 18)))


def test_attention_takes_an_empty_batch() -> None:
    heads = AttentionHeads("heads", 2, 4)
    y, saved = heads.forward(np.zeros((0, 7, 24)))
    assert heads.input_gradient(saved, y).shape == (0, 7, 24)
