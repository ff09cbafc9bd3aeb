"""Dropout."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn.dropout import Dropout

X = np.random.default_rng(0).normal(size=(40, 50))


def test_the_share_of_zeros_is_the_rate_and_the_rest_is_scaled() -> None:
    y, _ = Dropout("drop", 0.25, seed=1).forward(X)
    kept = y != 0.0
    assert 0.2 < 1.0 - kept.mean() < 0.3
    np.testing.assert_array_equal(y[kept], (X * (1.0 / 0.75))[kept])


def test_the_gradient_goes_where_values_were_kept() -> None:
    layer = Dropout("drop", 0.5, seed=1)
    y, saved = layer.forward(X)
    dx = layer.backward(saved, np.ones_like(X))
    np.testing.assert_array_equal(dx, np.where(y != 0.0, 2.0, 0.0))


def test_one_name_and_seed_drop_the_same_places_in_any_precision() -> None:
    double, single = (Dropout("drop", 0.5, seed=4) for _ in range(2))
    for _ in range(3):
        y, _ = double.forward(X)
        z, _ = single.forward(X.astype(np.float32))
        assert z.dtype == np.float32
        np.testing.assert_array_equal(y == 0.0, z == 0.0)


@pytest.mark.parametrize(("name", "seed"), [("drop", 5), ("other", 4)])
def test_another_name_or_seed_drops_other_places(name: str, seed: int) -> None:
    y, _ = Dropout("drop", 0.5, seed=4).forward(X)
    z, _ = Dropout(name, 0.5, seed=seed).forward(X)
    assert not np.array_equal(y == 0.0, z == 0.0)


def test_each_pass_drops_other_places() -> None:
    layer = Dropout("drop", 0.5, seed=4)
    y, _ = layer.forward(X)
    z, _ = layer.forward(X)
    assert not np.array_equal(y == 0.0, z == 0.0)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_without_training_nothing_is_dropped_or_drawn(rate: float) -> None:
    layer = Dropout("drop", rate, seed=4)
    layer.is_training = False
    before = layer.generators()[0].bit_generator.state
    y, saved = layer.forward(X)
    dx = layer.backward(saved, X)
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(dx, X)
    assert layer.generators()[0].bit_generator.state == before


def test_results_are_new_arrays_that_may_be_changed() -> None:
    layer = Dropout("drop", 0.5, seed=4)
    for is_training in (True, False):
        layer.is_training = is_training
        y, saved = layer.forward(X)
        assert not np.shares_memory(y, X)
        assert not np.shares_memory(layer.backward(saved, X), X)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="drop: expected a rate of 0 or more and less than 1"):
        Dropout("drop", rate, seed=0)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="drop: expected a seed of 0 or more, got -1"):
        Dropout("drop", 0.5, seed=-1)
    layer = Dropout("drop", 0.5, seed=0)
    with pytest.raises(UsageError, match="drop: expected an input of a floating dtype, got int64"):
        layer.forward(np.arange(3))  # type: ignore[arg-type]
    _, saved = layer.forward(X)
    with pytest.raises(UsageError, match=r"drop: expected an output gradient of shape \(40, 50\), got \(2,\)"):
        layer.backward(saved, np.ones(2))
