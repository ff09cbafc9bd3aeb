"""Gradients go into buckets and come out as means."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.gradsync import layout_cache
from asyncpar.gradsync.schemes import Alone
from asyncpar.nn import Parameter
from tests.gradsync.schemes.test_owners import make_bucket, make_parameters


def test_pack_then_unpack_scales_and_keeps_shapes() -> None:
    scheme, parameters = Alone(make_bucket()), make_parameters(0)
    before = {name: parameter.grad.copy() for name, parameter in parameters.items()}
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters))
    layout_cache.unpack(scheme, parameters, factor=0.5)
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter.grad, before[name] * np.float32(0.5))


def test_gradients_follow_each_other_in_backward_order() -> None:
    scheme, parameters = Alone(make_bucket()), make_parameters(0)
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters))
    expected = np.concatenate([parameters[name].grad.ravel() for name in ("c", "b", "a")])
    np.testing.assert_array_equal(scheme.payload, expected)


def test_micro_steps_weigh_the_same() -> None:
    scheme, parameters = Alone(make_bucket()), make_parameters(0)
    sums = {name: 2 * parameter.grad for name, parameter in parameters.items()}
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters, accumulated=sums, micro_steps=3))
    expected = np.concatenate([parameters[name].grad.ravel() for name in ("c", "b", "a")])
    np.testing.assert_allclose(scheme.payload, expected, rtol=1e-6)


def test_parameters_that_are_not_finite_are_named() -> None:
    scheme, parameters = Alone(make_bucket()), make_parameters(0)
    parameters["b"].grad[2] = -np.inf
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters))
    assert layout_cache.find_non_finite(scheme) == ["b"]
    scheme.settle()
    assert not scheme.is_finite


def test_gradients_that_lie_in_the_bucket_are_not_copied() -> None:
    scheme, parameters = Alone(make_bucket()), make_parameters(0)
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters))
    for slot in scheme.bucket.slots:
        layout_cache.bind(parameters[slot.name], slot, scheme.flat)
    parameters["b"].grad[2] = 17.0
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters, as_views=True))
    assert 17.0 in scheme.payload
    layout_cache.unpack_as_views(scheme, parameters, factor=2.0)
    assert parameters["b"].grad[2] == 34.0
    assert np.shares_memory(parameters["b"].grad, scheme.flat)


def test_a_gradient_of_another_dtype_cannot_lie_in_the_bucket() -> None:
    scheme = Alone(make_bucket())
    parameter = Parameter("b", np.zeros(7, np.float64))
    with pytest.raises(UsageError, match="expected gradients of float32, which is what the bucket holds, got float64"):
        layout_cache.bind(parameter, scheme.bucket.slots[1], scheme.flat)
