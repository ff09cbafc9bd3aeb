"""One rank of ``link.py``: reduce the same array in float32, in bfloat16, and as gradients in int8; print JSON lines.

fp32 is ``all_reduce`` in place.  bf16 casts, reduces the half as many bytes, and casts back, all of it timed.  int8 is
a step of ``GradientSynchronizer`` with error feedback over parameters that together have the same size; timed is all
of it, too: packing, encoding, both exchanges, decoding and writing the means back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.codecs import Int8
from asyncpar.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer

FORMS = ("fp32", "bf16", "int8")
_PARAMETERS = 24
_PERIOD = 61

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter, as far as the synchronizer is concerned."""

    name: str
    grad: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to reduce ``values``: ``reduce`` is timed, and each must come within ``error`` of what is expected."""

    values: Values
    expected: Values
    reduce: Callable[[], Awaitable[object]]
    error: float = 0.0


def make_form(name: str, comm: ap.Communicator, count: int, bucket_mb: float) -> Form:
    """Prepare the memory for ``count`` values."""
    ramp = np.resize(np.arange(_PERIOD, dtype=np.float32), count)
    total = ramp * np.float32(comm.size) + np.float32(comm.size * (comm.size - 1) / 2)
    values = np.empty(count, np.float32)
    if name == "fp32":
        return Form(values=values, expected=total, reduce=lambda: comm.all_reduce(values))
    if name == "bf16":
        half = np.empty(count, ml_dtypes.bfloat16)
        return Form(values=values, expected=total, reduce=lambda: _reduce_as_bfloat16(comm, values, half))
    gradients = [Gradient(f"weight{index}", part) for index, part in enumerate(np.array_split(values, _PARAMETERS))]
    synchronizer = _synchronizer(comm, bucket_mb)
    mean = total / np.float32(comm.size)
    bound = 4 * Int8().error_bound(total)  # encoded twice, and the error of the sum is fed back once
    return Form(values=values, expected=mean, reduce=lambda: _synchronize(synchronizer, gradients), error=bound)


async def _reduce_as_bfloat16(comm: ap.Communicator, values: Values, half: NDArray[ml_dtypes.bfloat16]) -> None:
    half[:] = values
    await comm.all_reduce(half)
    values[:] = half


async def _synchronize(synchronizer: GradientSynchronizer, gradients: list[Gradient]) -> None:
    async with synchronizer.step(gradients):
        pass


def _synchronizer(comm: ap.Communicator, bucket_mb: float) -> GradientSynchronizer:
    config = ThreeDParallelismConfig(dp_size=comm.size, tp_size=1, pp_size=1)
    return GradientSynchronizer(
        config,
        RankMapping(config, comm.rank),
        communicator=comm,
        bucketing=GradientBucketingConfig(bucket_size_mb=bucket_mb, max_buckets=1 << 10),
        compression=GradientCompressionConfig(enable_compression=True),
    )


async def measure(comm: ap.Communicator, form: Form, iterations: int) -> dict[str, float]:
    """Return the median seconds on the slowest rank, and the wrong elements on the rank that has most."""
    ramp = np.resize(np.arange(_PERIOD, dtype=np.float32), form.values.size)
    times, wrong = [], 0
    for iteration in range(iterations + 2):  # the first two warm up
        form.values[:] = ramp + np.float32(comm.rank)
        await comm.barrier()
        started = time.perf_counter()
        await form.reduce()
        if iteration >= 2:
            times.append(time.perf_counter() - started)
        wrong += int(np.count_nonzero(np.abs(form.values - form.expected) > form.error))
    outcome = np.array([statistics.median(times), wrong])
    await comm.all_reduce(outcome, "max")
    return {"seconds": float(outcome[0]), "wrong": float(outcome[1])}


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    async with ap.init() as node:
        comm = node.world
        for name in arguments.forms.split(","):
            form = make_form(name, comm, arguments.size // 4, arguments.bucket_mb)
            sent = comm.traffic.payload_bytes
            figures = await measure(comm, form, arguments.iterations)
            each = (comm.traffic.payload_bytes - sent) / (arguments.iterations + 2)
            if comm.rank == 0:
                record = {"form": name, "lane": node.links.lane_kind(1), "sent": each, **figures}
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
        await comm.barrier()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    arguments = parser.parse_args()
    ap.run(lambda: work(arguments))


if __name__ == "__main__":
    main()
