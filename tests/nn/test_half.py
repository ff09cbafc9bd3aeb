"""Parameters in half precision: what they store, what layers see, and what reaches the optimizer."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import UsageError
from asyncpar.nn import Initializer, Linear, Parameter
from asyncpar.nn.half import HalfInitializer, HalfParameter, stored_dtype, stored_value
from asyncpar.nn.optimizers import SGD, Adam, Optimizer

STORAGES = ["bfloat16", "float16"]


def make(storage: str, *values: float) -> HalfParameter:
    return HalfParameter("p", np.array(values, np.float32), storage=storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_values_are_rounded_and_seen_in_single_precision(storage: str) -> None:
    parameter = make(storage, 1.0, 1.0 + 2.0**-12, 3.0)
    assert parameter.value.dtype == parameter.dtype == np.float32
    assert parameter.value.tolist() == [1.0, 1.0, 3.0]
    assert parameter.stored.dtype == parameter.grad.dtype == stored_dtype(parameter) == np.dtype(parameter.storage)
    assert parameter.stored.nbytes + parameter.grad.nbytes == 3 * (2 + 2)
    assert stored_value(parameter) is parameter.stored


def test_the_copy_cannot_be_written_to_by_mistake() -> None:
    parameter = make("bfloat16", 1.0)
    with pytest.raises(ValueError, match="read-only"):
        parameter.value[0] = 2.0
    parameter.value = np.array([2.0], np.float32)
    assert parameter.stored.tolist() == [2.0]


@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_are_added_in_single_precision_and_rounded(storage: str) -> None:
    parameter = make(storage, 1.0, 1.0, 1.0)
    parameter.accumulate(np.array([1.0, 2.0, 3.0], np.float32))
    parameter.accumulate(np.array([2.0**-14, 0.5], np.float32), at=slice(1, 3))
    assert parameter.grad.astype(np.float32).tolist() == [1.0, 2.0, 3.5]
    parameter.zero_grad()
    assert not parameter.grad.astype(np.float32).any()


def test_a_gradient_beyond_float16_is_infinite() -> None:
    parameter = make("float16", 1.0)
    parameter.accumulate(np.array([60000.0], np.float32))
    parameter.accumulate(np.array([60000.0], np.float32))
    assert parameter.grad.tolist() == [math.inf]
    assert not Optimizer([parameter], SGD()).is_finite()


@pytest.mark.parametrize("storage", STORAGES)
def test_what_was_released_comes_back(storage: str) -> None:
    parameter = make(storage, 1.0, 2.0)
    kept = parameter.stored
    parameter.release_value()
    parameter.release_grad()
    with pytest.raises(UsageError, match="parameter p: its value is released"):
        _ = parameter.value
    assert parameter.is_released
    assert not parameter.has_grad
    assert parameter.grad.dtype == kept.dtype
    parameter.restore_value(kept)
    assert parameter.stored is kept


def test_updates_too_small_for_half_precision_add_up_in_the_master() -> None:
    parameter = make("bfloat16", 1.0)
    optimizer = Optimizer([parameter], SGD())
    parameter.accumulate(1.0)
    for _ in range(64):
        optimizer.step(2.0**-12)
    assert optimizer.state("p")["master"].tolist() == [1.0 - 64 * 2.0**-12]
    assert parameter.value.tolist() == [1.0 - 64 * 2.0**-12]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_value_takes_two_bytes_its_gradient_two_and_adam_twelve(storage: str) -> None:
    initializer = HalfInitializer.from_seed(0, storage=storage)
    layer = Linear("layer", 16, 8, initializer=initializer)
    optimizer = Optimizer(layer.parameters(), Adam())
    values = sum(parameter.size for parameter in layer.parameters())
    held = sum(stored_value(parameter).nbytes + parameter.grad.nbytes for parameter in layer.parameters())
    assert held == 4 * values
    assert optimizer.nbytes == 12 * values


@pytest.mark.parametrize("storage", STORAGES)
def test_layers_draw_what_they_draw_in_single_precision(storage: str) -> None:
    half = Linear("layer", 6, 4, initializer=HalfInitializer.from_seed(5, storage=storage))
    single = Linear("layer", 6, 4, initializer=Initializer.from_seed(5))
    for parameter, expected in zip(half.parameters(), single.parameters(), strict=True):
        assert isinstance(parameter, HalfParameter)
        np.testing.assert_array_equal(parameter.value, expected.value.astype(parameter.storage).astype(np.float32))


def test_a_part_of_a_tensor_keeps_its_slice() -> None:
    part = TensorSlice.along((6, 4), 1, 2, 4)
    layer = Linear("layer", 6, 4, initializer=HalfInitializer.from_seed(5), part=part)
    assert layer.weight.slice == part
    assert layer.weight.shape == (6, 2)


def test_a_layer_learns_in_half_precision() -> None:
    layer = Linear("layer", 3, 2, initializer=HalfInitializer.from_seed(1))
    optimizer = Optimizer(layer.parameters(), SGD(momentum=0.5))
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        y, saved = layer.forward(x)
        losses.append(float(np.square(y - target).mean()))
        layer.backward(saved, (y - target) / y.size)
        optimizer.step(0.5)
    assert losses[-1] < 0.7 * losses[0]


def test_bad_arrays_are_refused() -> None:
    with pytest.raises(UsageError, match="expected float32 values to store in bfloat16, got float64"):
        HalfParameter("p", np.ones(2))
    with pytest.raises(UsageError, match="storage: expected bfloat16 or float16, got float32"):
        make("float32", 1.0)
    parameter = make("float16", 1.0)
    with pytest.raises(UsageError, match="expected a gradient of float16 or float32"):
        parameter.grad = np.ones(1)
    with pytest.raises(UsageError, match="expected a C-contiguous value of float16 or float32"):
        parameter.restore_value(np.ones(1, ml_dtypes.bfloat16))
    with pytest.raises(UsageError, match="dtype: expected float32 to compute in beside bfloat16, got float64"):
        HalfInitializer.from_seed(0, "float64")


def test_a_single_precision_gradient_is_rounded() -> None:
    parameter = make("bfloat16", 1.0)
    parameter.grad = np.array([1.0 + 2.0**-12], np.float32)
    assert parameter.grad.astype(np.float32).tolist() == [1.0]


def test_other_parameters_are_stored_as_they_are() -> None:
    parameter = Parameter("p", np.ones(2))
    assert stored_dtype(parameter) == np.float64
    assert stored_value(parameter) is parameter.value
