"""Slices of tensors: what is cut can be put back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import UsageError


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), cut=st.data())
def test_the_parts_of_a_dimension_put_back_make_the_whole(shape: list[int], cut: st.DataObject) -> None:
    dim = cut.draw(st.integers(0, len(shape) - 1))
    at = cut.draw(st.integers(0, shape[dim]))
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    again = np.full_like(whole, -1.0)
    for start, stop in ((0, at), (at, shape[dim])):
        part = TensorSlice.along(tuple(shape), dim, start, stop)
        assert part.cut(whole).shape == part.local_shape
        part.put(part.cut(whole), again)
    assert np.array_equal(again, whole)


def test_columns_side_by_side_are_cut_through_a_view() -> None:
    whole = np.arange(2 * 12, dtype=np.float64).reshape(2, 12)
    part = TensorSlice(global_shape=(2, 12), view_shape=(2, 3, 4), dim=2, start=2, stop=4, local_shape=(2, 6))
    assert part.cut(whole)[0].tolist() == [2, 3, 6, 7, 10, 11]
    again = np.zeros_like(whole)
    part.put(part.cut(whole), again)
    assert again[1].tolist() == [0, 0, 14, 15, 0, 0, 18, 19, 0, 0, 22, 23]


def test_a_cut_is_a_copy_even_of_the_whole() -> None:
    whole = np.zeros((2, 3))
    TensorSlice.whole((2, 3)).cut(whole)[...] = 1.0
    assert not whole.any()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_tensor_without_dimensions_or_values_has_a_whole(shape: tuple[int, ...]) -> None:
    whole = TensorSlice.whole(shape)
    assert whole.is_whole
    assert whole.cut(np.ones(shape)).shape == shape


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"view_shape": (5,)}, "view_shape: expected as many values"),
        ({"dim": 2}, "dim: expected a dimension of"),
        ({"start": 3, "stop": 2}, "start, stop: expected a range within 0..2"),
        ({"stop": 3}, "start, stop: expected a range within 0..2"),
        ({"local_shape": (1, 2)}, "local_shape: expected as many values"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(changed: dict[str, int | tuple[int, ...]], text: str) -> None:
    good = {"global_shape": (2, 3), "view_shape": (2, 3), "dim": 0, "start": 0, "stop": 1, "local_shape": (1, 3)}
    with pytest.raises(UsageError, match=text):
        TensorSlice(**{**good, **changed})  # type: ignore[arg-type]


def test_wholes_and_parts_of_other_shapes_are_refused() -> None:
    part = TensorSlice.along((4, 2), 0, 1, 3)
    with pytest.raises(UsageError, match="whole: expected shape"):
        part.cut(np.zeros((2, 4)))
    with pytest.raises(UsageError, match="part: expected shape"):
        part.put(np.zeros((1, 2)), np.zeros((4, 2)))
    with pytest.raises(UsageError, match="whole: expected a C-contiguous array"):
        part.put(np.zeros((2, 2)), np.zeros((2, 4)).T)
