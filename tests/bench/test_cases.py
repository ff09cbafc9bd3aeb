"""Arguments and results of benchmarked operations equal those computed the plain way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncpar.bench.cases import Case, count_elements, make_case, period_of
from asyncpar.bench.settings import DTYPES, OPERATIONS, ROOT, WHOLE
from asyncpar.core.config.names import ReduceOp

MOVING = [operation for operation in OPERATIONS if operation != "barrier"]


def make_cases(
    operation: str, *, ranks: int, size: int = 1000, dtype: str = "float32", redop: ReduceOp = "sum"
) -> list[Case]:
    cases = [make_case(operation, size, rank=rank, ranks=ranks, dtype=dtype, reduction=redop) for rank in range(ranks)]
    for case in cases:
        case.fill()
    return cases


def perform(operation: str, cases: list[Case]) -> None:
    """Do what the operation does, by its definition, on all ranks at once."""
    given = [case.source.copy() for case in cases]
    ufunc = {"sum": np.add, "min": np.minimum, "max": np.maximum}[cases[0].reduction]
    share = cases[0].share
    for rank, case in enumerate(cases):
        mine = slice(rank * share, (rank + 1) * share)
        combined: NDArray[Any] = given[0]
        if operation in ("all_reduce", "all_reduce_many", "reduce", "reduce_scatter"):
            for other in given[1:]:
                combined = ufunc(combined, other)
        match operation:
            case "all_reduce" | "all_reduce_many":
                case.target[...] = combined
            case "reduce" if rank == ROOT:
                case.target[...] = combined
            case "reduce_scatter":
                case.target[...] = combined[mine]
            case "all_gather":
                case.target[...] = np.concatenate(given)
            case "gather" if rank == ROOT:
                case.target[...] = np.concatenate(given)
            case "broadcast":
                case.target[...] = given[ROOT]
            case "scatter":
                case.target[...] = given[ROOT][mine]
            case "all_to_all":
                case.target[...] = np.concatenate([other[mine] for other in given])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("operation", MOVING)
def test_what_the_definition_gives_is_right(operation: str, ranks: int) -> None:
    cases = make_cases(operation, ranks=ranks)
    perform(operation, cases)
    assert [case.count_wrong() for case in cases] == [0] * ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("redop", ["sum", "min", "max"])
def test_results_are_exact_in_every_dtype(dtype: str, redop: ReduceOp) -> None:
    cases = make_cases("all_reduce", ranks=4, dtype=dtype, redop=redop)
    perform("all_reduce", cases)
    assert [case.count_wrong() for case in cases] == [0] * 4
    assert len(set(cases[0].target.astype(np.float64).tolist())) > 2


@pytest.mark.parametrize("operation", MOVING)
def test_doing_nothing_is_wrong(operation: str) -> None:
    cases = make_cases(operation, ranks=3)
    left_alone = {"broadcast": [ROOT], "reduce": [1, 2], "gather": [1, 2]}.get(operation, [])
    for rank, case in enumerate(cases):
        wrong = case.count_wrong()
        assert (wrong == 0) == (rank in left_alone), rank
        if operation not in WHOLE and case.target.size:
            assert wrong == case.target.size


@pytest.mark.parametrize("place", [0, 1, 16384, 99_998, 99_999])
def test_one_wrong_element_anywhere_is_found(place: int) -> None:
    cases = make_cases("all_reduce", ranks=2, size=400_000)
    perform("all_reduce", cases)
    cases[1].target[place] += 1
    assert [case.count_wrong() for case in cases] == [0, 1]


def test_not_a_number_is_wrong() -> None:
    cases = make_cases("all_gather", ranks=2)
    perform("all_gather", cases)
    cases[0].target[3] = np.nan
    assert cases[0].count_wrong() == 1


def test_chunks_in_the_wrong_places_are_found() -> None:
    cases = make_cases("all_gather", ranks=2, size=1 << 20)
    perform("all_gather", cases)
    target = cases[0].target
    target[:] = np.concatenate([target[target.size // 2 :], target[: target.size // 2]])
    assert cases[0].count_wrong() == target.size


def test_a_root_that_changes_what_it_must_not_is_found() -> None:
    cases = make_cases("reduce", ranks=2)
    perform("reduce", cases)
    cases[1].target[5] = 0
    assert cases[1].count_wrong() == 1


def test_zeros_are_left_for_the_iterations() -> None:
    for operation in OPERATIONS:
        for case in make_cases(operation, ranks=2):
            case.clear()
            assert not case.source.any()
            assert not case.target.any()


def test_in_place_operations_have_one_array() -> None:
    for operation in OPERATIONS:
        (case,) = make_cases(operation, ranks=1)
        assert (case.source is case.target) == (operation in WHOLE)


def test_sizes_are_rounded_down_to_equal_shares_but_not_to_nothing() -> None:
    assert count_elements("all_gather", 1_000_000, ranks=3, itemsize=4) == 249_999
    assert count_elements("all_gather", 4, ranks=3, itemsize=4) == 3
    assert count_elements("all_reduce", 1, ranks=3, itemsize=8) == 1
    assert count_elements("all_reduce", 1_000_003, ranks=3, itemsize=4) == 250_000
    assert count_elements("barrier", 100, ranks=3, itemsize=4) == 0


def test_a_rank_allocates_only_what_it_gives_and_gets() -> None:
    sizes = {
        operation: [(case.source.size, case.target.size) for case in make_cases(operation, ranks=2, size=80)]
        for operation in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier")
    }
    assert sizes == {
        "all_gather": [(10, 20), (10, 20)],
        "reduce_scatter": [(20, 10), (20, 10)],
        "gather": [(10, 20), (10, 0)],
        "scatter": [(20, 10), (0, 10)],
        "all_to_all": [(20, 20), (20, 20)],
        "barrier": [(0, 0), (0, 0)],
    }


def test_many_small_arrays_make_the_whole_buffer() -> None:
    (case,) = make_cases("all_reduce_many", ranks=1, size=10_000)
    assert [piece.nbytes for piece in case.pieces()] == [4096, 4096, 1808]
    np.testing.assert_array_equal(np.concatenate(case.pieces()), case.source)
    assert all(np.shares_memory(piece, case.source) for piece in case.pieces())


def test_the_period_shrinks_until_sums_are_exact() -> None:
    assert period_of(np.dtype(np.float32), 1000) == 61
    assert period_of(np.dtype(DTYPES["bfloat16"]), 4) == 61
    assert period_of(np.dtype(DTYPES["bfloat16"]), 8) == 31
    assert period_of(np.dtype(np.int8), 16) == 7
    assert period_of(np.dtype(np.int8), 1000) == 2
