"""One rank of ``streamed.py``: steps with the optimizer behind the synchronization and in it, by turns; a JSON line."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

import asyncpar as ap
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer, SyncStep
from asyncpar.nn import Parameter
from asyncpar.nn.optimizers import AdamW, EarlyStep, Optimizer

_LARGEST = 1024 * 1024
"""Values of a parameter, at most."""

_RATE = 1e-3


class Side:
    """A model whose optimizer steps in the synchronization, or behind it."""

    def __init__(self, name: str, comm: ap.Communicator, arguments: argparse.Namespace, *, is_early: bool) -> None:
        self._comm = comm
        self._is_early = is_early
        self._compute = arguments.compute
        rng = np.random.default_rng(1)
        count = arguments.size // 4
        sizes = [min(_LARGEST, count - start) for start in range(0, count, _LARGEST)]
        self.parameters = [
            Parameter(f"weight{place}", rng.standard_normal((1, size), np.float32)) for place, size in enumerate(sizes)
        ]
        self._optimizer = Optimizer(self.parameters, AdamW(weight_decay=0.01))
        rng = np.random.default_rng((2, comm.rank))
        self._drawn = rng.standard_normal(_LARGEST, np.float32)
        codec = None if arguments.codec == "none" else arguments.codec
        self._synchronizer = GradientSynchronizer.data_parallel(
            comm,
            bucketing=GradientBucketingConfig(bucket_size_mb=arguments.bucket_mb),
            compression=GradientCompressionConfig(codec=codec),
            name=name,
        )
        self._matrix = np.ones((256, 256), np.float32)

    async def step(self) -> float:
        """Take one step, and return its seconds."""
        await self._comm.barrier()
        started = time.perf_counter()
        update = EarlyStep(self._optimizer, _RATE) if self._is_early else None
        async with self._synchronizer.step(self.parameters, update=update) as step:
            await asyncio.to_thread(self._backward, step)
        if update is None:
            await asyncio.to_thread(self._optimizer.step, _RATE)
        return time.perf_counter() - started

    def _backward(self, step: SyncStep) -> None:
        """Compute, and make gradients final, the last parameter's first."""
        each = self._compute / len(self.parameters)
        for parameter in reversed(self.parameters):
            end = time.perf_counter() + each
            while time.perf_counter() < end:
                self._matrix @ self._matrix
            parameter.grad[0] = self._drawn[: parameter.size]
            step.ready(parameter.name)

    def digest(self) -> str:
        """Return a hash of all parameters."""
        hasher = hashlib.sha256()
        for parameter in self.parameters:
            hasher.update(parameter.value.tobytes())
        return hasher.hexdigest()


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    async with ap.init() as node:
        comm = node.world
        sides = [Side(name, comm, arguments, is_early=name == "in") for name in ("behind", "in")]
        times: list[list[float]] = []
        for _ in range(arguments.steps + 2):
            own = np.array([await side.step() for side in sides])
            times.append([float(seconds) for seconds in await comm.all_reduce(own, "max")])
        digests = await comm.all_gather_object([side.digest() for side in sides], wanted=list[str])
        measured = times[2:]  # the first two make buffers, and learn the order of gradients
        behind, early = (statistics.median(column) for column in zip(*measured, strict=True))
        if comm.rank == 0:
            record = {
                "behind": behind,
                "in": early,
                "ratio": statistics.median(one[1] / one[0] for one in measured),
                "is_right": len({digest for both in digests for digest in both}) == 1,
                "times": measured,
            }
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
        await comm.barrier()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    parser.add_argument("--codec", required=True)
    arguments = parser.parse_args()
    ap.run(lambda: work(arguments))


if __name__ == "__main__":
    main()
