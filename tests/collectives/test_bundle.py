"""Bundles of arrays are packed and unpacked without losing or moving an element."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.bundle import Bundle, Section, check_arrays, cut, form_of, pack, sections_of, unpack
from asyncpar.errors import UsageError

F4 = np.dtype(np.float32)


@given(sizes=st.lists(st.integers(1, 9), max_size=12), ends=st.lists(st.integers(0, 108), max_size=6))
def test_ranges_of_a_section_pack_and_unpack_every_element_once(sizes: list[int], ends: list[int]) -> None:
    section = Section(F4, range(len(sizes)), sizes)
    numbers = np.arange(section.count, dtype=F4)
    flats = cut(numbers.copy(), sizes)
    bounds = sorted({0, section.count, *(end for end in ends if end < section.count)})
    for low, high in pairwise(bounds):
        chosen = section.range_of(low, high)
        memory = np.full(high - low, -1, F4)
        pack(chosen.pieces(flats), memory)
        np.testing.assert_array_equal(memory, numbers[low:high])
        assert section.lengths(chosen) == [piece.size for piece in chosen.pieces(flats)]
        unpack(cut(-memory, section.lengths(chosen)), chosen.pieces(flats))
    np.testing.assert_array_equal(np.concatenate([np.empty(0, F4), *flats]), -numbers)


def test_an_empty_range_has_no_pieces() -> None:
    section = Section(F4, range(2), [3, 4])
    for at in (0, 2, 3, 7):
        assert section.range_of(at, at).pieces([np.zeros(3, F4), np.zeros(4, F4)]) == []


def test_sections_are_sorted_by_dtype_and_leave_empty_arrays_out() -> None:
    arrays: list[Array] = [np.zeros(2, F4), np.zeros(3), np.zeros((0, 5)), np.zeros((2, 2), F4), np.zeros((), np.int8)]
    sections = sections_of(form_of(arrays))
    assert [(section.dtype.name, section.members, section.count) for section in sections] == [
        ("float32", (0, 3), 6),
        ("float64", (1,), 3),
        ("int8", (4,), 1),
    ]
    (nothing,) = sections_of(form_of([np.zeros(0)]))
    assert (nothing.members, nothing.count) == ((), 0)


def test_flat_arrays_of_one_dtype_are_used_as_they_are() -> None:
    arrays: list[Array] = [np.zeros(2), np.zeros(7)[::3]]
    bundle = Bundle(arrays, sections_of(form_of(arrays)))
    assert bundle.flats[0] is arrays


def test_arrays_that_cannot_be_flat_are_copied_and_written_back() -> None:
    arrays = [np.zeros((2, 3)), np.zeros((3, 2)).T]
    bundle = Bundle(arrays, sections_of(form_of(arrays)))
    for number, flat in enumerate(bundle.flats[0]):
        flat[...] = np.arange(6) + number
    assert (arrays[1] == 0).all()
    bundle.close()
    np.testing.assert_array_equal(arrays[0], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(arrays[1], [[1, 2, 3], [4, 5, 6]])


def read_only() -> Array:
    array = np.zeros(2)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (np.zeros((2, 2)), "arrays: expected a list of numpy arrays, got ndarray"),
        (7, "arrays: expected a list of numpy arrays, got int"),
        ("ab", "arrays: expected a list of numpy arrays, got str"),
        ([np.zeros(2), [1.0]], r"arrays\[1\]: expected a numpy array, got list"),
        ([np.zeros(2), np.ma.masked_array([1.0])], r"arrays\[1\]: expected an array without a mask"),
        ([np.zeros(2), np.zeros(2, object)], r"arrays\[1\]: expected a numeric dtype"),
        ([np.zeros(2), np.zeros(2, ">f4")], r"arrays\[1\]: expected a numeric dtype in native byte order"),
        ([np.zeros(2), read_only()], r"arrays\[1\]: expected an array that can be written, got a read-only one"),
    ],
    ids=str,
)
def test_what_cannot_be_reduced_is_refused_with_its_place(arrays: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        form_of(check_arrays(arrays))
