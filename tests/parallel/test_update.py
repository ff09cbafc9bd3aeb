"""Updates are measured, packed, merged and applied."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.nn import Parameter
from asyncpar.parallel.update import AsyncUpdate, Mover, UpdateLayout, merged

SHAPES = {"a": ((2, 3), "float64"), "b": ((5,), "float32"), "c": ((), "float64"), "d": ((3,), "float32")}


def make_parameters() -> list[Parameter]:
    return [Parameter(name, np.ones(shape, dtype)) for name, (shape, dtype) in SHAPES.items()]


def make_update(layout: UpdateLayout, value: float, step: int) -> AsyncUpdate:
    update = AsyncUpdate(layout)
    update.step = step
    for view in update.views():
        view[...] = value
    return update


def test_an_update_survives_its_bytes() -> None:
    parameters = make_parameters()
    layout = UpdateLayout(parameters)
    sent, received = make_update(layout, 2.5, 7), AsyncUpdate(layout)
    received.bytes[...] = sent.bytes
    assert received.step == 7
    received.apply()
    for parameter in parameters:
        np.testing.assert_array_equal(parameter.value, 3.5)
    assert [view.shape for view in received.views()] == [shape for shape, _ in SHAPES.values()]
    assert [view.dtype for view in received.views()] == [dtype for _, dtype in SHAPES.values()]


def test_two_updates_merge_into_what_both_do_and_stay_as_they_are() -> None:
    layout = UpdateLayout(make_parameters())
    first, second = make_update(layout, 1.0, 3), make_update(layout, 2.0, 4)
    both = merged(first, second)
    assert both.step == 4
    for update, value in ((both, 3.0), (first, 1.0), (second, 2.0)):
        for view in update.views():
            np.testing.assert_array_equal(view, value)


def test_only_a_share_of_a_movement_is_taken() -> None:
    parameters = make_parameters()
    mover = Mover(UpdateLayout(parameters), share=0.25)
    for _ in range(2):
        mover.remember()
        for parameter in parameters:
            parameter.value[...] += 4.0
        update = mover.measure()
        for view in update.views():
            np.testing.assert_array_equal(view, 1.0)
    for parameter in parameters:
        np.testing.assert_array_equal(parameter.value, 3.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_movement_that_is_not_finite_is_refused_and_undone(value: float) -> None:
    parameters = make_parameters()
    mover = Mover(UpdateLayout(parameters), share=0.5)
    mover.remember()
    parameters[1].value[2] = value
    with pytest.raises(NonFiniteValue, match="NaN or infinity in b"):
        mover.measure()
    for parameter in parameters:
        np.testing.assert_array_equal(parameter.value, 1.0)


def test_no_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one parameter"):
        UpdateLayout([])
