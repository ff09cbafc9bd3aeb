"""Measure what votes, digests and second buffers cost of an elastic step in which nothing happens (goal G10).

    scripts/bench/run elastic_cost --megabytes 100

Blocks of elastic steps alternate with blocks of bare ones: the same gradients, the same reduction, the same optimizer
in place, and no vote, digest or second buffer.  Rank 0 prints the medians of processor time and the ratio, which other
programs on the machine disturb less than that of the time on the clock.  ``--flops`` is what a step
computes per value of the parameters, with matrix products: 6 for each token of the batch.

What bounds it: for 75 MB of state, filling the second buffers takes 3.8 ms (the update itself 14.5 ms, in place), and
the checksums 3.3 ms (22 GB/s; 2.1 ms if each block were summed while it is in the cache).  So 1 % needs steps of 0.7 s
or more per 75 MB of state, such as 3,000 tokens for 25 MB of parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np

import asyncpar as ap
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.portions import PartialSums, Portions
from asyncpar.elasticity.reduction import FlatPool, PortionSum
from asyncpar.elasticity.state import ElasticState
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Parameter

SIDE = 512


def parse_arguments() -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--portions", type=int, default=4)
    parser.add_argument("--flops", type=float, default=6.0 * 1024, help="per value and step (default: 1,024 tokens)")
    parser.add_argument("--block", type=int, default=3, help="steps of one kind in a row")
    parser.add_argument("--rounds", type=int, default=4)
    return parser.parse_args()


class Work:
    """The model, and the time that its computation takes."""

    def __init__(self, options: argparse.Namespace) -> None:
        count = int(options.megabytes * (1 << 20) / 4)
        rng = np.random.default_rng(1)
        self.weight = Parameter("weight", rng.standard_normal(count, dtype=np.float32))
        self.gradient = rng.standard_normal(count, dtype=np.float32)
        self.optimizer = Optimizer([self.weight], Adam())
        self._a = rng.standard_normal((SIDE, SIDE), dtype=np.float32)
        self._products = max(1, round(options.flops * count / options.portions / (2 * SIDE**3)))
        self._thread = WorkerThread("compute")

    async def backward(self) -> None:
        """Compute for as long as one portion takes."""
        await self._thread.run(self._compute)

    def _compute(self) -> None:
        for _ in range(self._products):
            self._a @ self._a  # only its time matters


async def elastic_steps(job: ElasticJob, state: ElasticState, work: Work, until: int) -> list[float]:
    """Return the processor seconds of each step, on all cores."""
    seconds, before = [], time.process_time()
    async for step in job.steps(state, until=until):
        async with step:
            for portion in step.portions:
                await work.backward()
                step.add(portion, [work.gradient])
            gradients = await step.reduce("mean")
            await step.update(work.optimizer, gradients, learning_rate=1e-6)
        now = time.process_time()
        seconds.append(now - before)
        before = now
    return seconds


async def bare_steps(job: ElasticJob, work: Work, pool: FlatPool, count: int) -> list[float]:
    """Do the same without what makes a step elastic."""
    portions, seconds = Portions(job.portions, job.size), []
    for _ in range(count):
        before = time.process_time()
        sums = PartialSums(portions, job.rank)
        total = PortionSum(portions, sums, None, pool)
        for portion in portions.of(job.rank):
            await work.backward()
            sums.take(portion)
            total.add(portion, total.pack([work.gradient]), 0.0)
        flats, _ = await total.total(job.world, is_mean=True)
        own, work.weight.grad = work.weight.grad, flats[0][: work.weight.size]
        await asyncio.to_thread(work.optimizer.step, 1e-6)
        work.weight.grad = own
        total.release()
        await job.world.barrier()
        seconds.append(time.process_time() - before)
    return seconds


async def main(options: argparse.Namespace) -> None:
    """Measure."""
    work, bare_work, pool = Work(options), Work(options), FlatPool()
    elastic: list[float] = []
    bare: list[float] = []
    async with ap.elastic(portions=options.portions) as job:
        state = job.state([work.weight], work.optimizer)
        await elastic_steps(job, state, work, 2)
        await bare_steps(job, bare_work, pool, 2)
        for _ in range(options.rounds):
            elastic += await elastic_steps(job, state, work, state.step + options.block)
            await state.lineage()
            bare += await bare_steps(job, bare_work, pool, options.block)
        if job.rank == 0:
            one, other = statistics.median(elastic), statistics.median(bare)
            print(f"{job.size} ranks, {options.megabytes:g} MB, {state.nbytes / 2**20:.0f} MB of state")
            print(
                f"elastic {one * 1000:.0f} ms, bare {other * 1000:.0f} ms: {100 * (one / other - 1):+.1f} %   goal 1 %"
            )


if __name__ == "__main__":
    ap.run(main(parse_arguments()))
