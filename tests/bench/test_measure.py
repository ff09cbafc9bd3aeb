"""Measuring: real operations between ranks of one process, and a clock that is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import asyncpar as ap
from asyncpar.bench.measure import LEAST_ITERATIONS, measure
from asyncpar.bench.report import Measurement
from asyncpar.bench.settings import OPERATIONS, BenchSettings, cost_name
from asyncpar.collectives.algorithms.catalog import known_algorithms
from asyncpar.node import Node

SETTINGS = BenchSettings(sizes=(4,), budget=1.0)


def ticking(step: float) -> Callable[[], float]:
    """Return a clock that moves on by ``step`` whenever it is read."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    return clock


async def measure_all(
    operation: str,
    size: int,
    *,
    ranks: int = 3,
    settings: BenchSettings = SETTINGS,
    step: Callable[[int], float] = lambda rank: 0.125,
) -> list[Measurement]:
    async with ap.testing.local_world(ranks) as nodes:

        async def one(node: Node) -> Measurement:
            return await measure(node.world, operation, size, settings, clock=ticking(step(node.rank)))

        return await asyncio.gather(*(one(node) for node in nodes))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("ranks", [1, 3])
async def test_every_operation_is_measured_and_right(operation: str, ranks: int) -> None:
    results = await measure_all(operation, 4096, ranks=ranks)
    assert all(result == results[0] for result in results)
    assert results[0].wrong == 0
    assert results[0].operation == operation
    assert results[0].algorithm in known_algorithms(cost_name(operation))
    assert results[0].iterations == 8


async def test_the_slowest_rank_counts() -> None:
    results = await measure_all("all_reduce", 4096, step=lambda rank: 0.125 * (rank + 1))
    assert [round(result.time_us) for result in results] == [375_000] * 3
    assert [round(result.minimum_us) for result in results] == [375_000] * 3


async def test_the_budget_decides_how_many_iterations() -> None:
    few = await measure_all("all_reduce", 4, step=lambda rank: 100.0)
    some = await measure_all("all_reduce", 4, step=lambda rank: 1 / 64)
    assert few[0].iterations == LEAST_ITERATIONS
    assert some[0].iterations == 64


async def test_the_algorithm_that_ran_is_named() -> None:
    settings = BenchSettings(sizes=(4,), budget=1.0, algorithm="tree")
    results = await measure_all("all_reduce", 4096, settings=settings)
    assert results[0].algorithm == "tree"
    assert results[0].predicted_us > 0


async def test_a_group_of_one_costs_nothing_by_the_model() -> None:
    (result,) = await measure_all("all_reduce", 4096, ranks=1)
    assert result.predicted_us == 0.0
    assert result.algbw == pytest.approx(4096 / 0.125 / 1e9)
    assert result.busbw == 0.0


async def test_a_barrier_has_no_size() -> None:
    (result, *_) = await measure_all("barrier", 4096)
    assert (result.size, result.count, result.type, result.redop, result.root) == (0, 0, "none", "none", -1)


async def test_wrong_results_are_counted_on_the_rank_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ap.Communicator.all_reduce

    async def spoiling(comm: ap.Communicator, x: object, *args: object, **options: object) -> object:
        result = await real(comm, x, *args, **options)
        if result.size > 100:
            result[: comm.rank] = -5
        return result

    monkeypatch.setattr(ap.Communicator, "all_reduce", spoiling)
    results = await measure_all("all_reduce", 4096)
    assert [result.wrong for result in results] == [2, 2, 2]


async def test_a_tenth_of_the_iterations_warms_up_and_is_not_measured() -> None:
    now, reads = 0.0, 0

    def clock() -> float:
        nonlocal now, reads
        reads += 1
        now += 1 / 64 if reads <= 2 * 3 or reads > 2 * (3 + 6) else 100.0  # what warms up is slow
        return now

    async with ap.testing.local_world(1) as (node,):
        result = await measure(node.world, "all_reduce", 4, SETTINGS, clock=clock)
    assert reads == 2 * (3 + 6 + 64)
    assert result.iterations == 64
    assert result.time_us == result.minimum_us == result.p90_us == 1e6 / 64
