"""One rank of ``link.py``: average the same gradients in float32 and with each codec; print JSON lines.

Timed is a step of ``GradientSynchronizer`` over gradients that are there already: packing, encoding, exchanging,
decoding and writing the means back.  Gradients are views of buckets, as they are with torch, so that there is nothing
to copy; ``--copies`` has it otherwise.  Checked is that all ranks end with the same bits, and, of forms that send every
value with a known error, that the first step's means are as near as that error promises.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.codecs import Codec, parse_codec
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from scripts.bench.peers import gradients

_FP32 = "fp32"
_DENSE = ("bf16", "fp16", "int8", "int4")
_SMALL_BUCKET_MB, _LARGE_BUCKET_MB = 2.0, 8.0
"""Small where the wire has much to do and should begin early, large where the processor has."""
_SLACK = 1.1
"""Of error bounds: what is encoded second is a sum of decoded values, which may be larger than that of the values."""

Values = NDArray[np.float32]


@dataclass(slots=True)
class Gradient:
    """A parameter, as far as the synchronizer is concerned."""

    name: str
    grad: Values


class Form:
    """One way to average ``source`` over ranks."""

    def __init__(self, name: str, comm: ap.Communicator, arguments: argparse.Namespace) -> None:
        count = arguments.size // 4
        self.name = name
        self._comm = comm
        self._source = gradients.draw(count, comm.rank)
        self._parts = gradients.split(self._source, count)
        self._gradients = [Gradient(f"weight{index}", part.copy()) for index, part in enumerate(self._parts)]
        size = arguments.bucket_mb or (_SMALL_BUCKET_MB if name in _DENSE or name == _FP32 else _LARGE_BUCKET_MB)
        self._synchronizer = GradientSynchronizer.data_parallel(
            comm,
            bucketing=GradientBucketingConfig(
                bucket_size_mb=size, max_buckets=1 << 10, gradient_as_bucket_view=not arguments.copies
            ),
            compression=GradientCompressionConfig(codec=None if name == _FP32 else ap.Name(name)),
            name=name,
        )

    @property
    def choice(self) -> str:
        """What the codec ``auto`` went by and picked."""
        return self._synchronizer.codec_table()

    async def step(self) -> float:
        """Average once and return the seconds of it."""
        for gradient, part in zip(self._gradients, self._parts, strict=True):
            gradient.grad[...] = part
        await self._comm.barrier()
        started = time.perf_counter()
        async with self._synchronizer.step(self._gradients):
            pass
        return time.perf_counter() - started

    async def is_right(self, *, is_first: bool) -> bool:
        """Do all ranks hold the same bits, and are these near enough to the means?  To be called on all ranks."""
        values = np.concatenate([gradient.grad.ravel() for gradient in self._gradients])
        digests = await self._comm.all_gather_object(hashlib.sha256(values.tobytes()).hexdigest())
        if len(set(digests)) != 1 or not np.isfinite(values).all():
            return False
        expected = gradients.mean(values.size, self._comm.size)
        return not is_first or bool(np.abs(values - expected).max() <= self._bound(expected))

    def _bound(self, expected: Values) -> float:
        if self.name == _FP32:
            return float(np.abs(expected).max()) * 1e-6
        if self.name not in _DENSE:
            return float("inf")
        codec = parse_codec(self.name)
        assert isinstance(codec, Codec)
        own = max(codec.error_bound(gradients.draw(expected.size, rank)) for rank in range(self._comm.size))
        return _SLACK * (own + codec.error_bound(expected))


async def measure(comm: ap.Communicator, form: Form, budget: float) -> dict[str, float]:
    """Return the median seconds and the bytes sent on the slowest rank, and how many ranks found something wrong."""
    times = [await form.step()]
    is_right = await form.is_right(is_first=True)
    times += [await form.step() for _ in range(gradients.WARM_UP - 1)]
    once = float((await comm.all_reduce(np.array([times[-1]]), "max"))[0])
    count = gradients.iterations(once, budget)
    sent = comm.traffic.payload_bytes
    times = [await form.step() for _ in range(count)]
    each = (comm.traffic.payload_bytes - sent) / count
    is_right = is_right and await form.is_right(is_first=False)
    outcome = await comm.all_gather(np.array([statistics.median(times), each, not is_right]))
    seconds, most, wrong = outcome[:, 0].max(), outcome[:, 1].max(), outcome[:, 2].sum()
    return {"seconds": float(seconds), "sent": float(most), "wrong": int(wrong), "iterations": count}


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    async with ap.init() as node:
        comm = node.world
        for name in arguments.forms.split(","):
            form = Form(name, comm, arguments)
            figures = await measure(comm, form, arguments.budget)
            if comm.rank == 0:
                record = {"form": name, "lane": node.links.lane_kind(1), "choice": form.choice, **figures}
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
        await comm.barrier()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default=_FP32)
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--budget", type=float, default=1.5)
    parser.add_argument("--bucket-mb", type=float, default=0.0)
    parser.add_argument("--copies", action="store_true")
    arguments = parser.parse_args()
    ap.run(lambda: work(arguments))


if __name__ == "__main__":
    main()
