"""The arrays in a value are found, and their memory is counted once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncpar.pipeline.offload.packing import ByteLedger, arrays_in, bytes_of, owners_in


@dataclass(frozen=True, slots=True)
class Saved:
    x: Any
    more: Any = None


class Pair(NamedTuple):
    one: Any
    other: Any


def test_arrays_are_found_in_any_nesting() -> None:
    arrays = [np.full(2, float(number)) for number in range(6)]
    value = [
        arrays[0],
        {"a": (arrays[1], None)},
        Saved(arrays[2], Pair(arrays[3], "text")),
        [[arrays[4]]],
        5,
        arrays[5],
    ]
    assert sorted(float(array[0]) for array in arrays_in(value)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_arrays_are_found_in_partials_and_closures() -> None:
    one, other, third = (np.full(3, float(number)) for number in range(3))

    def work(factor: float, array: Any = third) -> float:
        return factor * float(one[0] + array[0])

    assert bytes_of([work, partial(work, 1.0, array=other)]) == 3 * one.nbytes


def test_a_view_counts_as_the_memory_that_it_keeps_alive() -> None:
    whole = np.zeros((10, 10))
    assert bytes_of(whole[:1]) == whole.nbytes
    assert bytes_of([whole[:1], whole.T, whole.reshape(-1)[3:4]]) == whole.nbytes


def test_an_array_that_occurs_twice_is_counted_once() -> None:
    array = np.zeros(7)
    assert bytes_of([array, array, (array,)]) == array.nbytes
    assert len(list(arrays_in([array, (array, [array])]))) == 1


def test_a_container_that_contains_itself_is_walked_once() -> None:
    value: list[Any] = [np.zeros(2)]
    value.append(value)
    assert bytes_of(value) == 16


def test_memory_that_values_share_is_counted_until_the_last_is_removed() -> None:
    ledger = ByteLedger()
    shared, own = np.zeros(100), np.zeros(10)
    one, other = owners_in([shared, own]), owners_in([shared[:5]])
    ledger.add(one)
    ledger.add(other)
    assert (ledger.current, ledger.peak) == (880, 880)
    ledger.remove(one)
    assert ledger.current == 800
    ledger.remove(other)
    assert (ledger.current, ledger.peak) == (0, 880)
    ledger.start_anew()
    assert ledger.peak == 0
