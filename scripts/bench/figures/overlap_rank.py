"""One rank of ``overlap.py``: time communication alone, compute alone, and both at once; rank 0 prints a JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer, SyncStatistics

DEVICE, MATMUL = "device", "matmul"
_WARMUP = 2
_EDGE = 256
_TRIAL = 20

Values = NDArray[np.float32]


@dataclass(slots=True)
class Gradient:
    """A parameter, as far as the synchronizer is concerned."""

    name: str
    grad: Values


class Compute:
    """A backward pass of about ``seconds`` over ``parts`` layers of equal work, without the interpreter's lock.

    ``device`` waits, as for an accelerator; ``matmul`` multiplies matrices on this core, which is work of a fixed
    amount: with less of the core it takes longer.
    """

    def __init__(self, kind: str, seconds: float, parts: int) -> None:
        self._kind = kind
        self._seconds = seconds / parts
        self._matrix = np.full((_EDGE, _EDGE), 1 / _EDGE, np.float32)
        self._out = np.empty_like(self._matrix)
        self._products = 1
        if kind == MATMUL:
            self._multiply(_TRIAL)
            start = time.perf_counter()
            self._multiply(_TRIAL)
            self._products = max(1, round(self._seconds * _TRIAL / (time.perf_counter() - start)))

    def part(self) -> None:
        """Compute one layer's gradients."""
        if self._kind == DEVICE:
            time.sleep(self._seconds)
        else:
            self._multiply(self._products)

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            np.matmul(self._matrix, self._matrix, out=self._out)


class Step:
    """The step that is measured, with and without its halves."""

    def __init__(self, comm: ap.Communicator, arguments: argparse.Namespace) -> None:
        count = arguments.size // 4 // arguments.parameters
        self.gradients = [Gradient(f"weight{i}", np.ones(count, np.float32)) for i in range(arguments.parameters)]
        self.synchronizer = GradientSynchronizer.data_parallel(
            comm,
            bucketing=GradientBucketingConfig(
                bucket_size_mb=arguments.bucket_mb, max_buckets=1 << 10, gradient_as_bucket_view=arguments.views
            ),
            compression=GradientCompressionConfig(codec="int8" if arguments.int8 else None),
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def communicate(self) -> None:
        async with self.synchronizer.step(self.gradients):
            pass

    async def compute(self, compute: Compute) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, self._backward, compute, lambda _name: None)

    async def do_both(self, compute: Compute) -> None:
        async with self.synchronizer.step(self.gradients) as step:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._backward, compute, step.ready)

    def _backward(self, compute: Compute, ready: Callable[[str], None]) -> None:
        for gradient in reversed(self.gradients):
            compute.part()
            ready(gradient.name)


async def time_slowest(comm: ap.Communicator, action: Coroutine[Any, Any, None]) -> float:
    """Return the seconds that ``action``, begun at the same time everywhere, takes on the slowest rank."""
    await comm.barrier()
    start = time.perf_counter()
    await action
    seconds = np.array([time.perf_counter() - start])
    await comm.all_reduce(seconds, "max")
    return float(seconds[0])


async def measure(comm: ap.Communicator, step: Step, arguments: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return medians of the seconds of all three, measured in turn, and the overlap fraction of the statistics."""
    warm = [await time_slowest(comm, step.communicate()) for _ in range(_WARMUP + arguments.iterations)]
    seconds = statistics.median(warm[_WARMUP:]) * arguments.factor
    compute = Compute(arguments.compute, seconds, len(step.gradients))
    times: dict[str, list[float]] = {"communication": [], "compute": [], "both": []}
    fractions = []
    for _ in range(arguments.iterations):
        times["communication"].append(await time_slowest(comm, step.communicate()))
        times["compute"].append(await time_slowest(comm, step.compute(compute)))
        before = step.synchronizer.get_sync_stats()
        times["both"].append(await time_slowest(comm, step.do_both(compute)))
        fractions.append(fraction_between(before, step.synchronizer.get_sync_stats()))
    return {name: statistics.median(each) for name, each in times.items()}, statistics.median(fractions)


def fraction_between(before: SyncStatistics, after: SyncStatistics) -> float:
    """Return the overlap fraction of the steps between two copies of a synchronizer's statistics."""
    steps = SyncStatistics(
        total_sync_time=after.total_sync_time - before.total_sync_time,
        total_exposed_time=after.total_exposed_time - before.total_exposed_time,
    )
    return steps.overlap_fraction


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    async with ap.init() as node:
        comm = node.world
        step = Step(comm, arguments)
        figures, fraction = await measure(comm, step, arguments)
        wrong = sum(int(np.count_nonzero(gradient.grad != 1.0)) for gradient in step.gradients)
        outcome = np.array([float(wrong), -fraction])
        await comm.all_reduce(outcome, "max")
        if comm.rank == 0:
            figures |= {"wrong": float(outcome[0]), "overlap_fraction": -float(outcome[1])}
            sys.stdout.write(json.dumps({"lane": node.links.lane_kind(1), **figures}) + "\n")
            sys.stdout.flush()
        await comm.barrier()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--factor", type=float, required=True)
    parser.add_argument("--compute", choices=(DEVICE, MATMUL), required=True)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--views", action="store_true")
    arguments = parser.parse_args()
    ap.run(lambda: work(arguments))


if __name__ == "__main__":
    main()
