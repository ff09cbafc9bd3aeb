"""The rules for peers, which run where asyncpar is not installed, are those of `asyncpar bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.bench import cases, measure, settings
from scripts.bench.peers import rules

OPERATIONS = tuple(operation for operation in settings.OPERATIONS if operation != "all_reduce_many")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [4, 1000, 1_000_000])
def test_peers_get_the_same_work(operation: str, ranks: int, size: int) -> None:
    for rank in range(ranks):
        ours = cases.make_case(operation, size, rank=rank, ranks=ranks, dtype="float32")
        theirs = rules.make_case(operation, size, rank=rank, ranks=ranks)
        assert theirs.count == ours.count
        if ours.source.size:
            assert theirs.source.size == ours.source.size
        if ours.target.size:
            assert theirs.target.size == ours.target.size
        ours.fill()
        theirs.fill()
        if theirs.gets and operation != "barrier":
            theirs.target[...] = theirs._expected()  # noqa: SLF001  # the peer's right result, which a peer's library would have written into the target
            ours.target[...] = theirs.target
            assert (theirs.wrong(), ours.count_wrong()) == (0, 0)


def test_the_numbers_of_iterations_are_the_same() -> None:
    assert (rules.LEAST_ITERATIONS, rules.MOST_ITERATIONS) == (measure.LEAST_ITERATIONS, measure.MOST_ITERATIONS)
    assert rules.ROOTED == settings.ROOTED
    assert set(rules.WHOLE) == set(settings.WHOLE) & set(OPERATIONS)


def peer(call: Callable[[rules.Case], Any]) -> rules.Peer:
    """A library of one rank."""
    return rules.Peer(
        rank=0,
        ranks=1,
        calls=dict.fromkeys(OPERATIONS, lambda case: lambda: call(case)),
        barrier=lambda: None,
        largest=lambda value: value,
    )


def copy(case: rules.Case) -> None:
    if case.target is not case.source:
        np.copyto(case.target, case.source)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_peer_that_does_it_right_is_measured(operation: str) -> None:
    case = rules.make_case(operation, 1000, rank=0, ranks=1)
    record = rules.measure(peer(copy), case, budget=0.001)
    assert record["op"] == operation
    assert record["size"] == (0 if operation == "barrier" else 1000)
    assert record["wrong"] == 0
    assert isinstance(record["iterations"], int)
    assert record["iterations"] >= rules.LEAST_ITERATIONS


def test_a_peer_that_does_nothing_is_found_out() -> None:
    case = rules.make_case("all_gather", 1000, rank=0, ranks=1)
    assert rules.measure(peer(lambda case: None), case, budget=0.001)["wrong"] == 250
