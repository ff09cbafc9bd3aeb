"""Sums of gradients over micro-steps."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.multinode import GradientSyncBuffer
from asyncpar.nn import Array


def filled(*counts: tuple[str, int]) -> GradientSyncBuffer:
    """Return a buffer with the gradients 1, 2, ... under each name."""
    buffer = GradientSyncBuffer()
    for name, count in counts:
        for number in range(count):
            buffer.add_gradient(name, np.full(3, number + 1.0))
    return buffer


def test_gradients_are_counted_by_name() -> None:
    buffer = filled(("weight", 4), ("bias", 4))
    assert buffer.counts == {"weight": 4, "bias": 4}
    means = buffer.average_gradients()
    assert {name: mean.tolist() for name, mean in means.items()} == {"weight": [2.5] * 3, "bias": [2.5] * 3}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_gradients_of_micro_steps_have_themselves_as_mean(count: int) -> None:
    buffer = GradientSyncBuffer()
    for _ in range(count):
        buffer.add_gradient("weight", np.full(2, 7.0))
    assert buffer.average_gradients(count)["weight"].tolist() == [7.0, 7.0]


def test_a_mean_is_taken_once_however_often_it_is_asked_for() -> None:
    buffer = filled(("weight", 2))
    assert buffer.average_gradients(2)["weight"].tolist() == [1.5] * 3
    assert buffer.average_gradients(2)["weight"].tolist() == [1.5] * 3


def test_micro_steps_without_a_gradient_count_as_zeros() -> None:
    assert filled(("weight", 2)).average_gradients(4)["weight"].tolist() == [0.75] * 3


def test_more_gradients_than_micro_steps_are_refused_and_nothing_is_divided() -> None:
    buffer = filled(("bias", 2), ("weight", 3))
    with pytest.raises(UsageError, match="micro_steps: expected at least 3, the gradients of weight, got 2"):
        buffer.average_gradients(2)
    assert buffer["bias"].tolist() == [3.0] * 3


def test_micro_steps_are_a_positive_number() -> None:
    with pytest.raises(UsageError, match="micro_steps: expected 1 or more, got 0"):
        filled(("weight", 1)).average_gradients(0)


def test_an_added_gradient_is_copied() -> None:
    gradient = np.ones(2)
    buffer = GradientSyncBuffer()
    buffer.add_gradient("weight", gradient)
    gradient += 1.0
    assert buffer["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("gradient", [np.ones(2), np.ones(3, np.float32)])
def test_gradients_keep_their_shape_and_dtype(gradient: Array) -> None:
    with pytest.raises(UsageError, match=r"gradient of weight: expected float64\[3\] as before, got float"):
        filled(("weight", 1)).add_gradient("weight", gradient)


def test_integers_are_no_gradients() -> None:
    with pytest.raises(UsageError, match="gradient of weight: expected a floating dtype, got int64"):
        GradientSyncBuffer().add_gradient("weight", np.ones(2, np.int64))


def test_nothing_is_added_between_averaging_and_clearing() -> None:
    buffer = filled(("weight", 1))
    buffer.average_gradients()
    with pytest.raises(UsageError, match="add_gradient: the gradients have been averaged; clear the buffer first"):
        buffer.add_gradient("weight", np.ones(3))
    buffer.clear()
    buffer.add_gradient("weight", np.full(3, 5.0))
    assert buffer["weight"].tolist() == [5.0] * 3


def test_clearing_frees_everything() -> None:
    buffer = filled(("weight", 2), ("bias", 1))
    assert (buffer.nbytes, len(buffer), "bias" in buffer) == (48, 2, True)
    buffer.clear()
    assert (buffer.nbytes, len(buffer), list(buffer), dict(buffer.counts)) == (0, 0, [], {})


def test_a_place_can_be_kept_for_what_has_no_gradient() -> None:
    buffer = filled(("weight", 1))
    buffer.add_nothing("weight", (3,), np.dtype(np.float64))
    buffer.add_nothing("bias", (2,), np.dtype(np.float32))
    assert buffer.counts == {"weight": 1, "bias": 0}
    means = buffer.average_gradients()
    assert (means["weight"].tolist(), means["bias"].tolist()) == ([1.0] * 3, [0.0] * 2)


def test_an_unknown_gradient_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="there is no gradient of 'bias' in the buffer"):
        GradientSyncBuffer()["bias"]


def test_scalars_have_means_too() -> None:
    buffer = GradientSyncBuffer()
    for value in (1.0, 2.0):
        buffer.add_gradient("scale", np.array(value))
    assert buffer.average_gradients(2)["scale"] == 1.5
