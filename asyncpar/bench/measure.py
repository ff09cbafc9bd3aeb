"""Timing of one operation of one size, on all ranks together.

Method.  One operation on known values, every element of the result compared; two more; one that is timed, by which the
ranks agree on a number of iterations that fills the budget; a tenth as many to warm up; then the iterations, each timed
on every rank; and another comparison.  The time of a size is the median over the iterations on the rank on which that
is largest.  Operations with a root start after a barrier, which is not timed, since a root that waits for no other rank
would run ahead; the others follow one another at once, as they do in programs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncpar.bench.cases import Allocate, Case, make_case
from asyncpar.bench.report import Measurement, bandwidths, root_column
from asyncpar.bench.settings import REDUCING, ROOT, ROOTED, BenchSettings, cost_name
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import Name

LEAST_ITERATIONS: Final = 5
MOST_ITERATIONS: Final = 10_000

Clock = Callable[[], float]
Call = Callable[[], Awaitable[Any]]


async def measure(
    comm: Communicator,
    operation: str,
    size: int,
    settings: BenchSettings,
    *,
    clock: Clock,
    allocate: Allocate = np.empty,
) -> Measurement:
    """Return the measurement of ``operation`` of ``size`` bytes, the same on every rank.

    ``allocate(shape, dtype)`` allocates the arrays.
    """
    case = make_case(
        operation,
        size,
        rank=comm.rank,
        ranks=comm.size,
        dtype=settings.dtype,
        reduction=settings.reduction,
        allocate=allocate,
    )
    call = bind(comm, case, None if settings.algorithm is None else Name(settings.algorithm))
    wrong = await _checked(comm, case, call)
    calls_before = _calls(comm, operation)
    times = await _times(comm, case, call, budget=settings.budget, clock=clock)
    algorithm = _used(calls_before, _calls(comm, operation))
    wrong = max(wrong, await _checked(comm, case, call))
    return await _summary(comm, case, times, wrong=wrong, algorithm=algorithm)


async def _summary(
    comm: Communicator, case: Case, times: NDArray[np.float64], *, wrong: int, algorithm: str
) -> Measurement:
    """Agree on the figures of the slowest rank."""
    operation = case.operation
    median, minimum, p90, most_wrong = await _largest(
        comm, float(np.median(times)), float(times.min()), float(np.quantile(times, 0.9)), wrong
    )
    algbw, busbw = bandwidths(operation, case.nbytes, median, comm.size)
    return Measurement(
        operation=operation,
        size=case.nbytes,
        count=case.count,
        type=case.source.dtype.name if case.count else "none",
        redop=case.reduction if operation in REDUCING else "none",
        root=root_column(operation, ROOT),
        time_us=median * 1e6,
        minimum_us=minimum * 1e6,
        p90_us=p90 * 1e6,
        iterations=times.size,
        wrong=int(most_wrong),
        algorithm=algorithm,
        predicted_us=comm.predict(cost_name(operation), case.nbytes, algorithm=Name(algorithm)) * 1e6,
        algbw=algbw,
        busbw=busbw,
    )


def bind(comm: Communicator, case: Case, algorithm: Name | None) -> Call:
    """Return the call to time."""
    is_root = case.rank == ROOT
    by_rank = (case.ranks, -1)
    source, target = case.source, case.target
    match case.operation:
        case "all_reduce":
            return partial(comm.all_reduce, source, case.reduction, algorithm=algorithm)
        case "all_reduce_many":
            return partial(comm.all_reduce_many, case.pieces(), case.reduction, algorithm=algorithm)
        case "reduce":
            out = target if is_root else None
            return partial(comm.reduce, source, case.reduction, root=ROOT, out=out, algorithm=algorithm)
        case "reduce_scatter":
            return partial(comm.reduce_scatter, source, case.reduction, out=target, algorithm=algorithm)
        case "all_gather":
            return partial(comm.all_gather, source, out=target.reshape(by_rank), algorithm=algorithm)
        case "gather":
            out = target.reshape(by_rank) if is_root else None
            return partial(comm.gather, source, root=ROOT, out=out, algorithm=algorithm)
        case "scatter":
            rows = source.reshape(by_rank) if is_root else None
            return partial(comm.scatter, rows, root=ROOT, out=target, algorithm=algorithm)
        case "all_to_all":
            rows, out = source.reshape(by_rank), target.reshape(by_rank)
            return partial(comm.all_to_all, rows, out=out, algorithm=algorithm)
        case "broadcast":
            return partial(comm.broadcast, source, root=ROOT, algorithm=algorithm)
    return partial(comm.barrier, algorithm=algorithm)


async def _times(comm: Communicator, case: Case, call: Call, *, budget: float, clock: Clock) -> NDArray[np.float64]:
    """Return the seconds of each iteration on this rank."""
    prepare = comm.barrier if case.operation in ROOTED else None
    once = (await _iterate(call, 3, prepare, clock))[-1]
    (slowest,) = await _largest(comm, float(once))
    iterations = int(min(max(budget / max(slowest, 1e-9), LEAST_ITERATIONS), MOST_ITERATIONS))
    await _iterate(call, iterations // 10, prepare, clock)
    return await _iterate(call, iterations, prepare, clock)


async def _iterate(call: Call, iterations: int, prepare: Call | None, clock: Clock) -> NDArray[np.float64]:
    times = np.zeros(iterations)
    for index in range(iterations):
        if prepare is not None:
            await prepare()
        started = clock()
        await call()
        times[index] = clock() - started
    return times


async def _checked(comm: Communicator, case: Case, call: Call) -> int:
    """Run once on known values and return this rank's wrong elements; leave zeros on all ranks."""
    case.fill()
    await comm.barrier()
    await call()
    wrong = case.count_wrong()
    case.clear()
    await comm.barrier()
    return wrong


async def _largest(comm: Communicator, *values: float) -> tuple[float, ...]:
    """Return the largest of each value over all ranks."""
    return tuple((await comm.all_reduce(np.array(values), "max")).tolist())


def _calls(comm: Communicator, operation: str) -> dict[str, int]:
    """Return how often each algorithm of ``operation`` has run."""
    entries = comm.traffic.operations
    return {entry.algorithm: entry.calls for entry in entries if entry.operation == operation}


def _used(before: dict[str, int], after: dict[str, int]) -> str:
    """Return the algorithm that ran most often since."""
    since = {algorithm: calls - before.get(algorithm, 0) for algorithm, calls in after.items()}
    return max(since, key=lambda algorithm: since[algorithm])
