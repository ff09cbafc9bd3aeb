"""Settings of benchmarks: accepted and refused values."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.bench.settings import OPERATIONS, BenchSettings
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.cost import bus_factor
from asyncpar.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operations": ("all_reduce", "juggle")}, "op: expected one of all_reduce, .*got 'juggle'"),
        ({"operations": ()}, "op: expected at least one"),
        ({"sizes": ()}, "op: expected at least one operation and one size"),
        ({"dtype": "float8"}, "--dtype: expected one of float32, .*got 'float8'"),
        ({"reduction": "median"}, "--redop: expected one of sum, min, max, got 'median'"),
        ({"algorithm": "magic"}, "algorithm: all_reduce has .*got 'magic'"),
        ({"operations": ("barrier",), "algorithm": "ring"}, "algorithm: barrier has .*got 'ring'"),
        ({"budget": 0.0}, "--budget: expected seconds"),
        ({"budget": float("nan")}, "--budget: expected seconds"),
        ({"budget": 1e6}, "--budget: expected seconds"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchSettings(**{"sizes": (4,), **wrong})


def test_every_operation_is_one_of_a_communicator() -> None:
    assert [operation for operation in OPERATIONS if not hasattr(Communicator, operation)] == []


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_reduce_many", 1.5),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        *((name, 0.75) for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    assert bus_factor(operation, 4) == factor


def test_memory_counts_all_arrays_of_all_ranks() -> None:
    assert BenchSettings(sizes=(4, 1000)).memory_of(3) == 3000
    assert BenchSettings(operations=("all_reduce", "all_to_all"), sizes=(4, 1000)).memory_of(3) == 6000
